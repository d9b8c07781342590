"""How the graded groups of one step are collected: `docs/groups.md` says what each way costs and does to the gradient.

FixedGroups      every start gets the step's group size
AdaptiveGroups   a few rollouts for every start, the rest of the budget for groups whose rewards vary
DynamicSampling  groups whose rewards are all the same are replaced by those of further starts (DAPO)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

from covey.algorithms import Algorithm
from covey.data import Grader, Group, Sampler, Start, Task, collate
from covey.runtime.timer import Measure
from covey.train.prepare import has_signal

# Largest adaptive group, as a multiple of the step's group size, unless a size is given.
DEFAULT_MAX_FACTOR = 4


@dataclass(frozen=True)
class StepGroups:
    """The graded rollouts of one step."""

    groups: list[Group]  # to learn from
    dropped: list[Group] = field(default_factory=list)  # all rewards of the group are the same
    unselected: list[Group] = field(default_factory=list)  # sampled before any reward was looked at, for fair means
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def all_groups(self) -> list[Group]:
        """Every group that was drawn, in the order of the draws."""
        return sorted(self.groups + self.dropped, key=lambda group: group.start.index)

    def fractions_of_all(self, found: dict[str, float]) -> dict[str, float]:
        """Rescale fractions that `prepare_batch` measured on the kept groups to all sampled groups."""
        if not self.dropped:
            return found
        groups = len(self.groups) / len(self.all_groups)
        rollouts = _count(self.groups) / _count(self.all_groups)
        return found | {
            "groups/zero_advantage_fraction": 1.0 - (1.0 - found["groups/zero_advantage_fraction"]) * groups,
            "update/rows": found["update/rows"] * rollouts,
        }


@dataclass(frozen=True)
class GroupSource:
    """Draws, samples and grades the groups of one step.

    Every choice is a function of the fields and of the rewards, so that a resumed run repeats it.
    """

    task: Task
    sampler: Sampler
    grader: Grader
    algorithm: Algorithm
    seed: int
    step: int
    drawn: int  # starts that the run has drawn in the steps before
    measure: Measure  # times a phase by the name of its metric

    def draw(self, count: int, first: int = 0) -> list[Start]:
        """The starts number `first` to `first + count` of the step."""
        return self.task.draw(self.seed, self.step, count, first=first, before=self.drawn + first)

    def rollouts(self, starts: Sequence[Start], size: int, *, first_rollout: int = 0) -> list[Group]:
        """Graded groups."""
        with self.measure("time/sample"):
            groups = self.sampler.sample(starts, size, self.step, first_rollout)
        with self.measure("time/grade"):
            return self.grader.grade(groups)

    def have_signal(self, groups: list[Group]) -> list[bool]:
        """For every group, whether some decision of it gets an advantage. A KL in the reward is not considered."""
        batch = collate(groups)
        alive: list[bool] = has_signal(batch, self.algorithm.advantage(batch).advantages_BT).tolist()
        return alive


class GroupSize(Protocol):
    """Rollouts in each group of a step."""

    def at(self, step: int) -> int:
        """The group size of a step; steps count from 1."""


@dataclass(frozen=True)
class FixedSize:
    """The same group size in every step."""

    size: int

    def at(self, step: int) -> int:
        return self.size


@dataclass(frozen=True)
class LinearSize:
    """first + (last - first) (step - 1) / (steps - 1), rounded: `first` in step 1, `last` in the last step."""

    first: int
    last: int
    steps: int

    def at(self, step: int) -> int:
        return self.first + round((self.last - self.first) * (step - 1) / max(self.steps - 1, 1))


class Collector(Protocol):
    """A way to collect the groups of one step."""

    def collect(self, source: GroupSource, count: int, size: int) -> StepGroups:
        """Groups from `count` starts, with about `count * size` rollouts in all."""


@dataclass(frozen=True)
class FixedGroups:
    """`size` rollouts from every start."""

    def collect(self, source: GroupSource, count: int, size: int) -> StepGroups:
        groups = source.rollouts(source.draw(count), size)
        return StepGroups(groups, unselected=groups)


@dataclass(frozen=True)
class LogGroupSizes:
    """Adds metrics of the group sizes to the groups of another collector."""

    collector: Collector

    def collect(self, source: GroupSource, count: int, size: int) -> StepGroups:
        found = self.collector.collect(source, count, size)
        return replace(found, metrics=group_sizes(found.groups) | found.metrics)


@dataclass(frozen=True)
class AdaptiveGroups:
    """A first round for every start; the rest of `count * size` goes in equal parts to the groups that vary.

    Two rounds are enough, because a group that varies goes on varying. What cannot be split evenly, or would make
    groups larger than the maximum, is not spent. For algorithms that compare within groups: with a critic or a
    baseline over the whole step, a group whose rewards are all the same teaches too.
    """

    initial_size: int  # rollouts of every start in the first round
    max_size: int = 0  # of a group; 0: DEFAULT_MAX_FACTOR times the step's group size

    def collect(self, source: GroupSource, count: int, size: int) -> StepGroups:
        first, largest = self.initial_size, self.max_size or DEFAULT_MAX_FACTOR * size
        judged = source.rollouts(source.draw(count), first)
        live = [group for group, alive in zip(judged, source.have_signal(judged), strict=True) if alive]
        left = count * (size - first)
        more = min(left // len(live), largest - first) if live else 0
        added = source.rollouts([group.start for group in live], more, first_rollout=first) if more else []
        further = {group.start.index: group for group in added}
        groups = [_joined(group, further.get(group.start.index, Group(group.start, []))) for group in judged]
        unused = {"groups/unused_budget": float(left - more * len(live))}
        return StepGroups(groups, unselected=judged, metrics=group_sizes(groups) | unused)


@dataclass(frozen=True)
class DynamicSampling:
    """Further starts in place of groups that do not vary: DAPO (arXiv 2503.14476), eq. 11.

    The step may end with fewer groups than `count`. If none varies, the last ones stay and teach nothing. For
    algorithms that compare within groups, as `AdaptiveGroups`.
    """

    max_resamples: int  # times that a step may draw further starts

    def collect(self, source: GroupSource, count: int, size: int) -> StepGroups:
        kept: list[Group] = []
        dropped: list[Group] = []
        groups = source.rollouts(source.draw(count), size)
        resamples = 0
        while True:
            for group, alive in zip(groups, source.have_signal(groups), strict=True):
                (kept if alive else dropped).append(group)
            if len(kept) == count or resamples == self.max_resamples:
                break
            resamples += 1
            groups = source.rollouts(source.draw(count - len(kept), first=len(kept) + len(dropped)), size)
        if not kept:
            kept, dropped = dropped[-count:], dropped[:-count]
        dropped = [replace(group, dropped=True) for group in dropped]
        metrics = {"groups/drawn": float(len(kept) + len(dropped)), "groups/resamples": float(resamples)}
        found = StepGroups(kept, dropped, metrics=metrics)
        return replace(found, unselected=found.all_groups)


def _joined(group: Group, further: Group) -> Group:
    """A group with the rollouts of a second round."""
    names = group.logged | further.logged
    logged = {name: group.logged.get(name, []) + further.logged.get(name, []) for name in names}
    return replace(group, rollouts=group.rollouts + further.rollouts, logged=logged)


def group_sizes(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of how many rollouts the groups have."""
    sizes = [len(group.rollouts) for group in groups]
    return {"groups/size_mean": fmean(sizes), "groups/size_max": float(max(sizes))}


def _count(groups: Sequence[Group]) -> int:
    return sum(len(group.rollouts) for group in groups)
