"""The record of a finished step, as observers receive it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from covey.data.types import Group, Rollout


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a completion, as lists of equal length. None at tokens that the policy did not decide.

    Numbers are rounded to six decimals.
    """

    ids: list[int]
    texts: list[str]  # joined, they are the completion with its special tokens
    logprobs: list[float | None]  # of the policy that sampled, in nats
    reference_logprobs: list[float | None] | None  # None: the reference did not evaluate this rollout
    advantages: list[float | None]
    updated_logprobs: list[float | None] | None  # of the policy after the update of the step; None: not evaluated


@dataclass(frozen=True)
class PromptTable:
    """The prompt as the model read it."""

    text: str  # with the special tokens
    ids: list[int]


@dataclass(frozen=True)
class RolloutCredit:
    """What a step computed from the reward of a rollout, and what is recorded with it.

    >>> RolloutCredit(advantage=1.73, baseline=0.25)  # reward 1 in a group of four with the mean 0.25
    """

    advantage: float | None  # mean over the decisions; None: grading failed, or the group was dropped
    baseline: float | None  # mean reward of the group's graded rollouts, of a critic its mean value; None: unknown
    tokens: TokenTable | None = None
    prompt: PromptTable | None = None  # None: that of the rollout before it in the group, or no language model


@dataclass(frozen=True)
class StepRecord:
    """A finished step. Observers read it and change nothing."""

    step: int  # counts from 1
    metrics: dict[str, float]
    groups: Sequence[Group]  # all that were drawn, also dropped ones
    credits: Sequence[Sequence[RolloutCredit]]  # of the rollouts of each group

    def rollouts(self) -> Iterator[tuple[Group, Rollout, RolloutCredit]]:
        """Every rollout with its group and its credit."""
        for group, credits in zip(self.groups, self.credits, strict=True):
            for rollout, credit in zip(group.rollouts, credits, strict=True):
                yield group, rollout, credit
