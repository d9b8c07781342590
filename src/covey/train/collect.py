"""Collectors of the graded groups of one step. `docs/groups.md` compares their costs and their gradients.

FixedGroups      every start gets the step's group size
AdaptiveGroups   a few rollouts from every start, the rest of the budget for groups whose rewards differ
DynamicSampling  groups whose rewards are all equal are replaced by groups from further starts (DAPO)
WithTeacher      gives the rollouts of another collector the prompts of a teacher
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from covey.algorithms import Algorithm
from covey.data import Grader, Group, Sampler, SamplerWeights, Start, Task, Team, collate
from covey.runtime.distributed import ALONE, WHOLE, gather_groups, lost_together, own_shards, share
from covey.train.metrics import Measure
from covey.train.prepare import has_signal
from covey.train.selection import PromptSelection

GroupSize = Callable[[int], int]  # rollouts in each group of a step; steps count from 1

# Largest adaptive group, as a multiple of the step's group size, unless a size is given.
DEFAULT_MAX_FACTOR = 4


@dataclass(frozen=True)
class StepGroups:
    """The graded rollouts of one step."""

    groups: list[Group]  # for the update
    dropped: list[Group] = field(default_factory=list)  # groups whose rewards are all equal
    unselected: list[Group] = field(default_factory=list)  # sampled before any reward was known: unbiased means
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def all_groups(self) -> list[Group]:
        """Every group that was drawn, in the order of the draws."""
        return sorted(self.groups + self.dropped, key=lambda group: group.start.index)

    def fractions_of_all(self, measured: dict[str, float]) -> dict[str, float]:
        """Rescale fractions that `prepare_batch` measured on the kept groups to all sampled groups."""
        if not self.dropped:
            return measured
        groups = len(self.groups) / len(self.all_groups)
        rollouts = _count(self.groups) / _count(self.all_groups)
        return measured | {
            "groups/zero_advantage_fraction": 1.0 - (1.0 - measured["groups/zero_advantage_fraction"]) * groups,
            "update/rows": measured["update/rows"] * rollouts,
        }


@dataclass(frozen=True)
class GroupSource:
    """Draws, samples and grades the groups of one step.

    Every choice is a function of the fields and of the rewards, so a resumed run repeats it.
    """

    task: Task
    sampler: Sampler
    grader: Grader
    algorithm: Algorithm
    seed: int
    step: int
    drawn: int  # number of starts that the run has drawn in earlier steps
    measure: Measure  # times a phase; the argument is the name of its metric
    team: Team = ALONE
    weights: SamplerWeights = WHOLE
    selection: PromptSelection = field(default_factory=PromptSelection)

    def draw(self, count: int, first: int = 0) -> list[Start]:
        """`count` starts of the step, with indices from `first`."""
        return self.selection.draw(self.task, self.seed, self.step, count, first=first, before=self.drawn + first)

    def rollouts(self, starts: Sequence[Start], size: int, *, first_rollout: int = 0) -> list[Group]:
        """Sample and grade `size` rollouts from each start, numbered from `first_rollout`.

        Each rank samples the starts of its shards, one shard after the other, and receives the groups of all ranks.
        """
        parts = share(len(starts), self.team)
        own = [starts[parts[shard]] for shard in own_shards(self.team)]
        groups: list[Group] = []
        with self.measure("time/sample"), self.weights.gathered():
            for part in own:  # also an empty one, because ranks with sharded weights sample together
                with lost_together(self.team):
                    groups += self.sampler.sample(part, size, self.step, first_rollout)
        with self.measure("time/grade"):
            graded = self.grader.grade(groups)
        if self.team.size == 1:
            return graded
        with self.measure("time/gather"):
            return gather_groups(graded, starts, self.team, f"step {self.step}")

    def have_signal(self, groups: list[Group]) -> list[bool]:
        """For each group, whether a decision of it has a non-zero advantage. A KL in the reward is not considered."""
        batch = collate(groups)
        signal_G: list[bool] = has_signal(batch, self.algorithm.estimate_advantages(batch).advantages_BT).tolist()
        return signal_G


def fixed_size(size: int) -> GroupSize:
    """The same group size in every step."""
    return lambda step: size


def linear_size(first: int, last: int, steps: int) -> Callable[[float], int]:
    """Linear schedule, rounded: first + (last - first) (step - 1) / (steps - 1)."""
    return lambda step: first + round((last - first) * (step - 1) / max(steps - 1, 1))


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
        collected = self.collector.collect(source, count, size)
        return replace(collected, metrics=group_sizes(collected.groups) | collected.metrics)


@dataclass(frozen=True)
class WithTeacher:
    """Gives the rollouts of another collector's groups, when these are complete, the prompts of a teacher."""

    collector: Collector
    contexts: Callable[[Group], Sequence[Any]]  # one for each rollout; empty: the rollout has no teacher

    def collect(self, source: GroupSource, count: int, size: int) -> StepGroups:
        collected = self.collector.collect(source, count, size)
        taught = []
        for group in collected.groups:
            for rollout, context in zip(group.rollouts, self.contexts(group), strict=True):
                rollout.teacher_context = context
                taught.append(len(context) > 0)
        return replace(collected, metrics=collected.metrics | {"teacher/rollouts": fmean(taught)})


@dataclass(frozen=True)
class AdaptiveGroups:
    """Two rounds of sampling: a few rollouts from every start, then more for the groups with a non-zero advantage.

    The second round divides the rest of the budget of `count * size` rollouts equally among these groups. No third
    round is needed, because the rewards of such a group stay different. A remainder that cannot be divided equally, or
    that would exceed the maximal group size, is not used. For algorithms that compare rollouts within their group: with
    a critic or a baseline over the whole step, a group whose rewards are all equal has a gradient too.
    """

    initial_size: int  # rollouts from every start in the first round
    max_size: int = 0  # of a group; 0: DEFAULT_MAX_FACTOR times the step's group size

    def collect(self, source: GroupSource, count: int, size: int) -> StepGroups:
        first, max_size = self.initial_size, self.max_size or DEFAULT_MAX_FACTOR * size
        initial = source.rollouts(source.draw(count), first)
        extended = [group for group, signal in zip(initial, source.have_signal(initial), strict=True) if signal]
        budget = count * (size - first)
        extra = min(budget // len(extended), max_size - first) if extended else 0
        added = source.rollouts([group.start for group in extended], extra, first_rollout=first) if extra else []
        added_by_start = {group.start.index: group for group in added}
        groups = [_joined(group, added_by_start.get(group.start.index, Group(group.start, []))) for group in initial]
        unused = {"groups/unused_budget": float(budget - extra * len(extended))}
        return StepGroups(groups, unselected=initial, metrics=group_sizes(groups) | unused)


@dataclass(frozen=True)
class DynamicSampling:
    """Dynamic sampling: groups without a non-zero advantage are replaced. DAPO (arXiv 2503.14476), eq. 11.

    The step may end with fewer groups than `count`. If no group has a non-zero advantage, the last `count` groups are
    kept and have no gradient. For algorithms that compare rollouts within their group, as `AdaptiveGroups`.
    """

    max_resamples: int  # maximal number of further draws in a step

    def collect(self, source: GroupSource, count: int, size: int) -> StepGroups:
        kept: list[Group] = []
        dropped: list[Group] = []
        groups = source.rollouts(source.draw(count), size)
        resamples = 0
        while True:
            for group, signal in zip(groups, source.have_signal(groups), strict=True):
                (kept if signal else dropped).append(group)
            if len(kept) == count or resamples == self.max_resamples:
                break
            resamples += 1
            groups = source.rollouts(source.draw(count - len(kept), first=len(kept) + len(dropped)), size)
        if not kept:
            kept, dropped = dropped[-count:], dropped[:-count]
        dropped = [replace(group, dropped=True) for group in dropped]
        metrics = {"groups/drawn": float(len(kept) + len(dropped)), "groups/resamples": float(resamples)}
        collected = StepGroups(kept, dropped, metrics=metrics)
        return replace(collected, unselected=collected.all_groups)


def _joined(group: Group, added: Group) -> Group:
    """A group with the rollouts of a second round."""
    names = group.logged | added.logged
    logged = {name: group.logged.get(name, []) + added.logged.get(name, []) for name in names}
    return replace(group, rollouts=group.rollouts + added.rollouts, logged=logged)


def group_sizes(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the numbers of rollouts in the groups."""
    sizes = [len(group.rollouts) for group in groups]
    return {"groups/size_mean": fmean(sizes), "groups/size_max": float(max(sizes))}


def _count(groups: Sequence[Group]) -> int:
    return sum(len(group.rollouts) for group in groups)
