"""What is recorded of a step beside its groups: metrics, and the credits of its rollouts.

RolloutRecorder  advantage and baseline of every rollout, the prompt of every group
TokenRecorder    also its tokens, with their log-probabilities after the update, which take a forward pass

Shapes: B rollouts, T decisions.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from covey.data import Group, Policy, PromptTable, Rollout, RolloutCredit, Team, TokenTable
from covey.runtime.device import peak_memory_bytes
from covey.runtime.distributed import ALONE
from covey.train.collect import StepGroups
from covey.train.metrics import Clock, describe, describe_rewards, present
from covey.train.prepare import Prepared, score_rows

T = TypeVar("T")

DECIMALS = 6  # of the numbers of a token
LEAST_COMPARED = 2  # graded rollouts of a group whose mean reward is a baseline


def no_prompts(group: Group) -> list[PromptTable | None]:
    """For a policy that reads no text."""
    return [None] * len(group.rollouts)


def prompts_read(texts: Callable[[Sequence[int]], list[str]], group: Group) -> list[PromptTable | None]:
    """The prompts that a language model read, each at the first of the rollouts that have it."""
    read = [[int(token) for token in rollout.context] for rollout in group.rollouts]
    is_new = [True, *(before != now for before, now in pairwise(read))]
    return [PromptTable("".join(texts(ids)), ids) if new else None for ids, new in zip(read, is_new, strict=False)]


@dataclass(frozen=True)
class RolloutRecorder:
    """Records advantage and baseline of every rollout, and the prompts that were read."""

    prompts: Callable[[Group], list[PromptTable | None]] = no_prompts

    def credits(self, collected: StepGroups, prepared: Prepared) -> list[list[RolloutCredit]]:
        """For each group of `collected.all_groups`, the credits of its rollouts. Every rank calls it."""
        counted_BT = prepared.decided_BT & prepared.rows.valid_B[:, None]
        advantages = _means(prepared.advantages_BT, counted_BT)
        compared = [baseline for group in collected.groups for baseline in _baselines(group)]
        of_critic = [_means(values_BT, counted_BT) for values_BT in present([prepared.rows.values_BT])]
        (baselines,) = of_critic or [compared]
        kept = map(RolloutCredit, advantages, baselines)
        dropped = (RolloutCredit(None, baseline) for group in collected.dropped for baseline in _baselines(group))
        by_group = zip(collected.all_groups, _by_group(collected, kept, dropped), strict=True)
        return [
            [replace(credit, prompt=prompt) for credit, prompt in zip(credits, self.prompts(group), strict=True)]
            for group, credits in by_group
        ]


@dataclass(frozen=True)
class TokenRecorder:
    """Records also the tokens of every rollout."""

    policy: Policy  # evaluated after the update
    texts: Callable[[Sequence[int]], list[str]]  # the texts of the tokens of a completion
    team: Team = ALONE
    prompts: Callable[[Group], list[PromptTable | None]] = no_prompts

    def credits(self, collected: StepGroups, prepared: Prepared) -> list[list[RolloutCredit]]:
        rows = replace(prepared.rows, mask_BT=prepared.decided_BT)
        updated_BT = score_rows(self.policy, rows, torch.ones_like(rows.valid_B), self.team)["logprobs_BT"]
        unknown_BT = torch.full_like(updated_BT, math.nan)
        known_BT = torch.where(rows.valid_B[:, None], prepared.advantages_BT, math.nan)
        (reference_BT,) = present([rows.reference_logprobs_BT]) or [unknown_BT]
        kept = map(self._table, _rollouts(collected.groups), *map(Tensor.tolist, (known_BT, reference_BT, updated_BT)))
        dropped = (
            self._table(rollout, *[[math.nan] * len(rollout.actions)] * 3) for rollout in _rollouts(collected.dropped)
        )
        tables = _by_group(collected, kept, dropped)
        credits = RolloutRecorder(self.prompts).credits(collected, prepared)
        return [
            [replace(credit, tokens=table) for credit, table in zip(*both, strict=True)]
            for both in zip(credits, tables, strict=True)
        ]

    def _table(
        self, rollout: Rollout, advantages: list[float], reference: list[float], updated: list[float]
    ) -> TokenTable:
        ids = [int(action) for action in rollout.actions]
        (decided,) = present([rollout.decided]) or [[True] * len(ids)]

        def known(values: Sequence[float]) -> list[float | None]:
            """None at unknown numbers and at undecided tokens. `values` may be padded."""
            return [
                round(value, DECIMALS) + 0.0 if decides and math.isfinite(value) else None  # + 0.0: no -0.0
                for value, decides in zip(values, decided, strict=False)
            ]

        def known_or_none(values: Sequence[float]) -> list[float | None] | None:
            found = known(values)
            return found if present(found) else None

        return TokenTable(
            ids,
            self.texts(ids),
            known(rollout.behavior_logprobs),
            known_or_none(reference),
            known(advantages),
            known_or_none(updated),
        )


Recorder = RolloutRecorder | TokenRecorder


def _means(value_BT: Tensor, counted_BT: Tensor) -> list[float | None]:
    """The mean of each row over its counted decisions; None if there is none, or the mean is not finite."""
    total_B = torch.where(counted_BT, value_BT, 0.0).double().sum(dim=1)
    return [mean if math.isfinite(mean) else None for mean in (total_B / counted_BT.sum(dim=1)).tolist()]


def _baselines(group: Group) -> list[float | None]:
    """For each rollout, the mean reward of the graded rollouts; None if there are too few to compare."""
    graded = present(rollout.reward for rollout in group.rollouts)
    return [fmean(graded) if len(graded) >= LEAST_COMPARED else None] * len(group.rollouts)


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def _by_group(collected: StepGroups, of_kept: Iterable[T], of_dropped: Iterable[T]) -> list[list[T]]:
    """Values of the rollouts of kept and dropped groups, as one list for each of all groups."""
    values = chain(of_kept, of_dropped)
    found = {
        group.start.index: [next(values) for _ in group.rollouts] for group in collected.groups + collected.dropped
    }
    return [found[group.start.index] for group in collected.all_groups]


def step_metrics(
    collected: StepGroups, prepared: dict[str, float], updated: dict[str, float], clock: Clock
) -> dict[str, float]:
    """The metrics of a step: rollouts, batch, update, times and memory."""
    described = describe(collected.all_groups)
    return (
        described
        | describe_rewards(collected.unselected)
        | collected.metrics
        | collected.fractions_of_all(prepared)
        | updated
        | clock.seconds
        | {
            "time/step": clock.total(),
            "decisions_per_second": described["decisions/sampled"] / clock.total(),
            "memory/peak_bytes": float(peak_memory_bytes()),
        }
    )
