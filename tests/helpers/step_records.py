"""Records of steps that were not trained."""

from collections.abc import Sequence

from covey.data import Group, RolloutCredit, StepRecord

UNKNOWN = RolloutCredit(None, None)


def step_record(step: int, metrics: dict[str, float] | None = None, groups: Sequence[Group] = ()) -> StepRecord:
    """A step whose rollouts have no credit."""
    return StepRecord(step, metrics or {}, groups, [[UNKNOWN] * len(group.rollouts) for group in groups])
