"""How the graded groups of one step come together: `docs/groups.md` says what each way costs and does to the gradient.

fixed      every start gets `group_size` rollouts
scheduled  the same, with a size that changes evenly over the run
adaptive   a few rollouts for every start, the rest of the budget for groups whose rewards vary
redraws    groups whose rewards are all the same are replaced by further starts (DAPO's dynamic sampling)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from covey.data import Group, Start, collate
from covey.runtime.timer import Measure
from covey.train.prepare import has_signal

if TYPE_CHECKING:  # the loop imports this module
    from covey.train.loop import Components, LoopConfig

# Largest adaptive group, as a multiple of the step's group size, where nothing else is said.
MOST_TIMES = 4


@dataclass(frozen=True)
class CollectConfig:
    """What a run does beyond drawing every group once, at one size.

    The last three are for algorithms that compare within groups: where a critic or the whole step is compared with, a
    group whose rewards are all the same teaches too.
    """

    group_size_last: int | None = None  # of the last step; None: the group size stays
    adaptive_first: int | None = None  # rollouts of every start before any is judged; None: not adaptive
    adaptive_most: int | None = None  # largest adaptive group; None: MOST_TIMES the step's group size
    redraws: int = 0  # how often a step may draw further starts


@dataclass(frozen=True)
class StepGroups:
    """The graded rollouts of one step."""

    groups: list[Group]  # to learn from
    dropped: list[Group] = field(default_factory=list)  # sampled in vain: all rewards of the group are the same
    unselected: list[Group] = field(default_factory=list)  # sampled before any reward was looked at, for fair means
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def all_groups(self) -> list[Group]:
        """Every group that was drawn, in the order of the draws."""
        return sorted(self.groups + self.dropped, key=lambda group: group.start.index)

    def shares_of_all(self, found: dict[str, float]) -> dict[str, float]:
        """Metrics of `prepare_batch` that are shares of what it was given, as shares of all that was sampled."""
        if not self.dropped:
            return found
        groups = len(self.groups) / len(self.all_groups)
        rollouts = _count(self.groups) / _count(self.all_groups)
        return found | {
            "groups/zero_advantage_fraction": 1.0 - (1.0 - found["groups/zero_advantage_fraction"]) * groups,
            "update/rows": found["update/rows"] * rollouts,
        }


def gather(
    parts: Components,
    settings: LoopConfig,
    step: int,
    drawn: int,
    measure: Measure,
) -> StepGroups:
    """Draw starts, sample and grade their groups, in the way that `settings.gathering` names.

    Every choice is a function of the arguments and of the rewards, so that a resumed run repeats it.

    Args:
        drawn: starts that the run has drawn in the steps before.
        measure: times a phase by the name of its metric.
    """
    source = _Source(parts, settings, step, drawn, measure)
    size = step_group_size(settings, step)
    starts = source.draw(settings.starts_per_step)
    way = settings.gathering
    if way.adaptive_first is not None:
        return _adaptive(source, starts, size, way.adaptive_first, way.adaptive_most or MOST_TIMES * size)
    if way.redraws:
        return _redrawn(source, starts, size, way.redraws)
    groups = source.rollouts(starts, size)
    return StepGroups(groups, unselected=groups, metrics=_sizes(groups) if way.group_size_last else {})


def step_group_size(settings: LoopConfig, step: int) -> int:
    """first + (last - first) (step - 1) / (steps - 1), rounded: first at step 1, last at the last step."""
    first, last = settings.group_size, settings.gathering.group_size_last
    if last is None:
        return first
    return first + round((last - first) * (step - 1) / max(settings.steps - 1, 1))


def _adaptive(source: _Source, starts: Sequence[Start], size: int, first: int, most: int) -> StepGroups:
    """A first round for all; what is left of len(starts) * size goes to the groups that vary, to each as much.

    Two rounds are enough: a group that varies goes on varying. What cannot be split evenly, or would make groups larger
    than `most`, is not spent.
    """
    judged = source.rollouts(starts, first)
    live = [group for group, alive in zip(judged, source.alive(judged), strict=True) if alive]
    left = len(starts) * (size - first)
    more = min(left // len(live), most - first) if live else 0
    added = source.rollouts([group.start for group in live], more, first_rollout=first) if more else []
    further = {group.start.index: group for group in added}
    groups = [_joined(group, further.get(group.start.index)) for group in judged]
    unspent = {"groups/unspent": float(left - more * len(live))}
    return StepGroups(groups, unselected=judged, metrics=_sizes(groups) | unspent)


def _redrawn(source: _Source, starts: Sequence[Start], size: int, redraws: int) -> StepGroups:
    """As many further starts as groups are missing that vary, at most `redraws` times: DAPO (arXiv 2503.14476),
    eq. 11 and its dynamic sampling.

    The step may end with fewer groups than it wanted. Where none varies, the last ones stay and teach nothing.
    """
    kept: list[Group] = []
    dropped: list[Group] = []
    groups = source.rollouts(starts, size)
    tries = 0
    while True:
        for group, alive in zip(groups, source.alive(groups), strict=True):
            (kept if alive else dropped).append(group)
        if len(kept) == len(starts) or tries == redraws:
            break
        tries += 1
        groups = source.rollouts(source.draw(len(starts) - len(kept)), size)
    if not kept:
        kept, dropped = dropped[-len(starts) :], dropped[: -len(starts)]
    dropped = [replace(group, dropped=True) for group in dropped]
    metrics = {"groups/drawn": float(len(kept) + len(dropped)), "groups/redraws": float(tries)}
    gathered = StepGroups(kept, dropped, metrics=metrics)
    return replace(gathered, unselected=gathered.all_groups)


class _Source:
    """Where the starts and rollouts of one step come from."""

    def __init__(
        self,
        parts: Components,
        settings: LoopConfig,
        step: int,
        drawn: int,
        measure: Measure,
    ) -> None:
        self.parts, self.seed, self.step, self.measure = parts, settings.seed, step, measure
        self.before = drawn
        self.next_index = 0

    def draw(self, count: int) -> list[Start]:
        """The next starts of the step; no two of them have the same index."""
        first = self.next_index
        self.next_index += count
        return self.parts.task.draw(self.seed, self.step, count, first=first, before=self.before + first)

    def rollouts(self, starts: Sequence[Start], size: int, *, first_rollout: int = 0) -> list[Group]:
        """Graded groups."""
        with self.measure("time/sample"):
            groups = self.parts.sampler.sample(starts, size, self.step, first_rollout)
        with self.measure("time/grade"):
            return self.parts.grader.grade(groups)

    def alive(self, groups: list[Group]) -> list[bool]:
        """For every group: would some decision of it get an advantage? A KL in the reward is not asked."""
        batch = collate(groups)
        alive: list[bool] = has_signal(batch, self.parts.algorithm.advantage(batch).advantages_BT).tolist()
        return alive


def _joined(group: Group, further: Group | None) -> Group:
    """A group with the rollouts of a second round."""
    if further is None:
        return replace(group)
    names = group.logged | further.logged
    logged = {name: group.logged.get(name, []) + further.logged.get(name, []) for name in names}
    return replace(group, rollouts=group.rollouts + further.rollouts, logged=logged)


def _sizes(groups: Sequence[Group]) -> dict[str, float]:
    sizes = [len(group.rollouts) for group in groups]
    return {"groups/size_mean": fmean(sizes), "groups/size_max": float(max(sizes))}


def _count(groups: Sequence[Group]) -> int:
    return sum(len(group.rollouts) for group in groups)
