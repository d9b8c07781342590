"""Groups of completions for prompts: the chat template, a generator, and the rollouts made of what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.config import ConfigError, RunError
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.generation.generator import (
    Completion,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationSettings,
    Generator,
    RandomKey,
)
from covey.llm.model.chat import Chat


@dataclass
class LanguageSampler:
    """Samples `group_size` completions of every prompt; meets `covey.data.Sampler`.

    One uniform number per decision, a function of (seed, step, group, rollout, position), chooses its token: the same
    step of the same run makes the same choices, in whatever order and company its rows are decoded.
    """

    generator: Generator
    chat: Chat
    seed: int
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    rows_at_once: int = 0  # 0: the generator chooses
    version: int = 0  # of the weights
    deadline_seconds: float | None = None  # for one call of `sample`

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """Groups in the order of `starts`. The end token, where one was sampled, is the last action.

        Raises:
            ConfigError: if a prompt is too long for the model.
            RunError: if the logits are not finite, or the deadline passes.
        """
        settings = GenerationSettings(
            self.max_new_tokens, self.temperature, self.chat.end_ids, self.version, self.rows_at_once,
            self.deadline_seconds,
        )  # fmt: skip
        requests = [
            GenerationRequest(
                self.chat.encode(start.prompt), group_size, self._key(start, step, first_rollout), settings
            )
            for start in starts
        ]
        results = self.generator.generate(requests)
        return [
            Group(start, [self._rollout(request.prompt, completion) for completion in _completions(result)])
            for start, request, result in zip(starts, requests, results, strict=True)
        ]

    def shortened(self, groups: Sequence[Group], max_new_tokens: int) -> list[Group]:
        """The groups that this sampler would have written with a lower token limit; not graded."""

        def begin(rollout: Rollout) -> Completion:
            tokens = rollout.actions[:max_new_tokens]
            end = EndReason.STOP if tokens[-1] in self.chat.end_ids else EndReason.LENGTH
            return Completion(tokens, rollout.behavior_logprobs[:max_new_tokens], end, rollout.version)

        return [
            Group(group.start, [self._rollout(rollout.context, begin(rollout)) for rollout in group.rollouts])
            for group in groups
        ]

    def refresh(self, version: int) -> None:
        """Sample from the policy's current weights from now on."""
        self.generator.refresh(version)
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        """Nothing: every completion begins anew."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over."""

    def _key(self, start: Start, step: int, first_rollout: int) -> RandomKey:
        return RandomKey(self.seed, step, start.index, first_rollout)

    def _rollout(self, prompt: tuple[int, ...], completion: Completion) -> Rollout:
        ended = completion.end is EndReason.STOP
        return Rollout(
            context=prompt,
            actions=completion.tokens,
            behavior_logprobs=completion.logprobs,
            end=completion.end,
            text=self.chat.decode(completion.tokens[:-1] if ended else completion.tokens),
            version=completion.version,
        )


def _completions(result: list[Completion] | GenerationFailure) -> list[Completion]:
    """A step needs all of its groups, so a failure ends it.

    Raises:
        ConfigError: if the prompt is too long, which the user can mend before a run.
        RunError: for every other failure.
    """
    if not isinstance(result, GenerationFailure):
        return result
    error = ConfigError if result.reason is FailureReason.PROMPT_TOO_LONG else RunError
    raise error(result.message)


def greedy(sampler: LanguageSampler, max_new_tokens: int) -> LanguageSampler:
    """A sampler of likeliest tokens on the same policy, for evaluation."""
    return replace(sampler, max_new_tokens=max_new_tokens, temperature=0.0, rows_at_once=0)
