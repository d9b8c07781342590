"""Rollout replay: groups of earlier steps from which a step learns again. `docs/replay.md` describes the objective.

Only groups that had a gradient are kept, because the others would have none again: their rewards do not change.

Rollout replay: Sun et al., arXiv 2506.05316. Its weights: decoupled PPO, Hilton et al., arXiv 2110.00641.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from covey.config import ReplayConfig
from covey.data import Batch, Group, Start, Stateless, collate
from covey.data.serialization import for_learning, from_state, to_state
from covey.train.prepare import Prepared


@dataclass(frozen=True)
class Replayed:
    """The groups of earlier steps from which a step learns."""

    groups: list[Group] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Replay(Stateless):
    """Chooses the groups of earlier steps; in this class every step learns from its own groups alone."""

    def draw(self, step: int) -> Replayed:
        """The groups of earlier steps for a step, and metrics. Called once a step."""
        return Replayed()

    def after(self, step: int, groups: Sequence[Group], prepared: Prepared) -> None:
        """Keep groups of a finished step, whose rows are the first of `prepared`."""


@dataclass
class _Kept:
    group: Group
    step: int  # that sampled it
    uses: int = 0  # number of steps that have replayed it


class RecentGroups(Replay):
    """The newest groups that had a gradient; those of one step in the order in which their prompts were drawn.

    The choice depends on no random number and on no reward beyond whether the group had a gradient.
    """

    def __init__(self, *, groups: int, max_age: int, max_uses: int = 1) -> None:
        """
        Args:
            groups: replayed in a step, at most.
            max_age: steps after which a group is no longer replayed.
            max_uses: steps that replay a group, at most.
        """
        self.groups, self.max_age, self.max_uses = groups, max_age, max_uses
        self._kept: list[_Kept] = []  # the newest first

    def draw(self, step: int) -> Replayed:
        """The newest groups that are not too old and were not replayed too often."""
        usable = [one for one in self._kept if step - one.step <= self.max_age]
        chosen = usable[: self.groups]
        for one in chosen:
            one.uses += 1
        self._kept = [one for one in usable if one.uses < self.max_uses]
        age = {"replay/age": fmean(step - one.step for one in chosen)} if chosen else {}
        return Replayed([one.group for one in chosen], {"replay/groups": float(len(chosen))} | age)

    def after(self, step: int, groups: Sequence[Group], prepared: Prepared) -> None:
        """Keep the groups that had a gradient. At most groups x max_age are kept in all, because a group with as many
        before it is too old before its turn comes.
        """
        learnt = zip(groups, prepared.in_update(len(groups)), strict=True)
        kept = [_Kept(_for_learning(group), step) for group, in_update in learnt if in_update]
        self._kept = (kept + self._kept)[: self.groups * self.max_age]

    def state_dict(self) -> dict[str, Any]:
        """The kept groups."""
        rollouts = [rollout for one in self._kept for rollout in one.group.rollouts]
        kept = [
            {
                "step": one.step,
                "uses": one.uses,
                "rollouts": len(one.group.rollouts),
                "index": one.group.start.index,
                "weight": one.group.start.weight,
            }
            for one in self._kept
        ]
        return {"kept": kept, "rollouts": to_state(rollouts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the kept groups."""
        rollouts = iter(from_state(state["rollouts"]))
        self._kept = []
        for one in state["kept"]:
            start = Start(one["index"], None, weight=one["weight"])
            group = Group(start, [next(rollouts) for _ in range(one["rollouts"])])
            self._kept.append(_Kept(group, one["step"], one["uses"]))


def build_replay(replay: ReplayConfig) -> Replay:
    """The groups of earlier steps that a step learns from again."""
    return RecentGroups(**vars(replay)) if replay.groups else Replay()


def joined(groups: list[Group], replayed: list[Group]) -> Batch:
    """The rollouts of a step and of earlier ones as one batch, those of the step first."""
    batch = collate(groups + replayed)
    return replace(batch, replayed_B=batch.group_B >= len(groups)) if replayed else batch


def _for_learning(group: Group) -> Group:
    """A group without what only its record needs."""
    start = Start(group.start.index, None, weight=group.start.weight)
    return Group(start, [for_learning(rollout) for rollout in group.rollouts])
