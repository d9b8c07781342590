"""Sampling groups of completions on the policy's own weights.

Shapes: S prompts, R rows (rollouts), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from covey.config import ConfigError
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.chat import Chat
from covey.llm.choosing import choose
from covey.llm.policy import LanguagePolicy
from covey.runtime.seeding import uniforms

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
        groups: list[Group] = []
        for chosen in self._pieces(prompts, group_size):
            rollouts = range(first_rollout, first_rollout + group_size)
            rows = self._decode([starts[i].index for i in chosen], [prompts[i] for i in chosen], rollouts, step)
            for place, i in enumerate(chosen):
                mine = rows[place * group_size : (place + 1) * group_size]
                groups.append(Group(starts[i], [self._rollout(prompts[i], row) for row in mine]))
        return groups

    def refresh(self, version: int) -> None:
        """The weights are shared with the trainer: only their version is noted."""
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        """Nothing: every completion begins anew."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over."""

    def _refuse_too_long(self, prompt_tokens: int) -> None:
        """A model knows positions up to a limit; some crash beyond it, others write nonsense."""
        limit = getattr(self.policy.module.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and prompt_tokens + self.max_new_tokens > limit:
            raise ConfigError(
                f"a prompt of {prompt_tokens} tokens and max_new_tokens = {self.max_new_tokens} exceed the model's "
                f"{limit} positions: shorten the prompts or lower max_new_tokens"
            )

    def _pieces(self, prompts: Sequence[tuple[int, ...]], group_size: int) -> list[range]:
        """Prompts whose groups fit into memory together."""
        rows = self.rows_at_once
        if not rows:
            config = self.policy.module.config.get_text_config()
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            per_token = 2 * config.num_hidden_layers * heads * width * self.policy.module.dtype.itemsize
            longest = max(len(prompt) for prompt in prompts) if not self.policy.shares_prompts else 0
            rows = CACHE_BYTES // (per_token * (self.max_new_tokens + longest))
        together = max(1, rows // group_size)
        return [range(i, min(i + together, len(prompts))) for i in range(0, len(prompts), together)]

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
        """All rows of some prompts, in order, until each has ended."""
        device, group_size = self.policy.device, len(rollouts)
        row_count = len(prompts) * group_size
        prompt_of_row = torch.arange(len(prompts)).repeat_interleave(group_size)
        groups_R = np.repeat(np.array(indices, dtype=np.int64), group_size)
        rollouts_R = np.tile(np.array(rollouts, dtype=np.int64), len(prompts))
        rows = [_Row([], []) for _ in range(row_count)]
        decoder = self.policy.decoder([list(p) for p in prompts], prompt_of_row, self.max_new_tokens)
        logits_RV = decoder.prefill()[prompt_of_row.to(device)]
        inside = np.arange(row_count)  # the rows that the decoder still carries
        going = np.ones(row_count, dtype=bool)  # which of them have not ended
        end_ids = np.array(sorted(self.chat.end_ids), dtype=np.int64)
        for position in range(self.max_new_tokens):
            where = np.full(len(inside), position, dtype=np.int64)
            uniforms_R = torch.from_numpy(uniforms(self.seed, step, groups_R[inside], rollouts_R[inside], where))
            tokens_R, logprobs_R = choose(logits_RV, uniforms_R.to(device), self.temperature)
            tokens, logprobs = tokens_R.cpu().numpy(), logprobs_R.float().cpu().numpy()
            for place in going.nonzero()[0]:
                rows[inside[place]].tokens.append(int(tokens[place]))
                rows[inside[place]].logprobs.append(float(logprobs[place]))
            going &= ~np.isin(tokens, end_ids)
            if position + 1 == self.max_new_tokens or not going.any():
                break
            # Rows that ended leave once they are an eighth: each departure copies the keys of those that stay.
            if going.sum() <= 0.875 * len(going):
                stay = torch.from_numpy(going.nonzero()[0])
                decoder.keep(stay.to(device))
                tokens_R, inside, going = tokens_R[stay.to(device)], inside[going], going[going]
            logits_RV = decoder.step(tokens_R)
        return rows


@dataclass
class _Row:
    """A completion being written."""

    tokens: list[int]
    logprobs: list[float]


def greedy(sampler: LanguageSampler, max_new_tokens: int) -> LanguageSampler:
    """A sampler of likeliest tokens on the same policy, for evaluation."""
    return LanguageSampler(sampler.policy, sampler.chat, sampler.seed, max_new_tokens, temperature=0.0)
