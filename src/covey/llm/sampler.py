"""Sampling groups of completions on the policy's own weights.

Shapes: R rows (rollouts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.config import ConfigError, RunError
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.generation.batch import ContinuousBatch
from covey.llm.model.chat import Chat
from covey.llm.policy import LanguagePolicy
from covey.llm.tasks.prompt_limit import length_fault
from covey.runtime.rng import uniforms

# Keys and values of rows decoded together may take this much memory where the config leaves it open.
CACHE_BYTES = 2 << 30


@dataclass
class LanguageSampler:
    """Decodes `group_size` completions of every prompt.

    One uniform number per decision, a function of (seed, step, group, rollout, position), chooses its token: the same
    step of the same run makes the same choices, in whatever order and company its rows are decoded.
    """

    policy: LanguagePolicy
    chat: Chat
    seed: int
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    rows_at_once: int = 0  # 0 chooses by memory
    version: int = 0

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """Groups in the order of `starts`. The end token, where one was sampled, is the last action."""
        prompts = [self.chat.encode(start.prompt) for start in starts]
        self._refuse_too_long(max(len(prompt) for prompt in prompts))
        rollouts = range(first_rollout, first_rollout + group_size)
        rows = self._decode([start.index for start in starts], prompts, rollouts, step)
        return [
            Group(start, [self._rollout(prompt, row) for row in rows[i * group_size : (i + 1) * group_size]])
            for i, (start, prompt) in enumerate(zip(starts, prompts, strict=True))
        ]

    def shortened(self, groups: Sequence[Group], max_new_tokens: int) -> list[Group]:
        """The groups that this sampler would have written with a lower token limit; not graded."""

        def begin(rollout: Rollout) -> _Row:
            return _Row(rollout.actions[:max_new_tokens], rollout.behavior_logprobs[:max_new_tokens])

        return [
            Group(group.start, [self._rollout(rollout.context, begin(rollout)) for rollout in group.rollouts])
            for group in groups
        ]

    def refresh(self, version: int) -> None:
        """The weights are shared with the trainer: only their version is noted."""
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        """Nothing: every completion begins anew."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over."""

    def _refuse_too_long(self, prompt_tokens: int) -> None:
        if fault := length_fault(self.policy.module.config, prompt_tokens, self.max_new_tokens):
            raise ConfigError(fault)

    def _rows_together(self, prompts: Sequence[tuple[int, ...]]) -> int:
        """Number of rows that fit into memory together."""
        if self.rows_at_once:
            return self.rows_at_once
        backend = self.policy.backend
        longest = max(len(prompt) for prompt in prompts) if not backend.shares_prompts else 0
        return CACHE_BYTES // (backend.row_bytes + backend.token_bytes * (self.max_new_tokens + longest))

    def _rollout(self, prompt: tuple[int, ...], row: _Row) -> Rollout:
        ended = row.tokens[-1] in self.chat.end_ids
        return Rollout(
            context=prompt,
            actions=row.tokens,
            behavior_logprobs=row.logprobs,
            end=EndReason.STOP if ended else EndReason.LENGTH,
            text=self.chat.decode(row.tokens[:-1] if ended else row.tokens),
            version=self.version,
        )

    def _decode(self, indices: list[int], prompts: list[tuple[int, ...]], rollouts: range, step: int) -> list[_Row]:
        """All rows of all prompts, in order."""
        group_size = len(rollouts)
        groups_R = np.repeat(np.array(indices, dtype=np.int64), group_size)
        rollouts_R = np.tile(np.array(rollouts, dtype=np.int64), len(prompts))
        together = min(max(self._rows_together(prompts), group_size), len(groups_R))
        batch = ContinuousBatch(
            self.policy.decoder(together, self.max_new_tokens), prompts, self._uniforms(step, groups_R, rollouts_R),
            together, self.temperature, self.chat.end_ids,
        )  # fmt: skip
        try:
            while not batch.is_done:
                batch.advance()
        except FloatingPointError:
            raise RunError(
                "the model's logits are not finite, so no token can be drawn: its weights have diverged. Go back to an "
                "earlier checkpoint and lower the learning rate"
            ) from None
        return [_Row(*completion) for prompt in range(len(prompts)) for completion in batch.completions(prompt)]

    def _uniforms(self, step: int, groups_R: NDArray[np.int64], rollouts_R: NDArray[np.int64]) -> NDArray[np.float64]:
        """One for every decision that some rows may come to, [R, max_new_tokens]."""
        tokens = self.max_new_tokens
        positions = np.tile(np.arange(tokens), len(groups_R))
        numbers = uniforms(self.seed, step, groups_R.repeat(tokens), rollouts_R.repeat(tokens), positions)
        return numbers.reshape(len(groups_R), tokens)


@dataclass
class _Row:
    """A completion being written."""

    tokens: list[int]
    logprobs: list[float]


def greedy(sampler: LanguageSampler, max_new_tokens: int) -> LanguageSampler:
    """A sampler of likeliest tokens on the same policy, for evaluation."""
    return replace(sampler, max_new_tokens=max_new_tokens, temperature=0.0, rows_at_once=0)
