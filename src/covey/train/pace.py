"""The time budget of a training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from covey.data import Team
from covey.runtime.distributed import exchange_json

METRIC = "time/elapsed"
Number = TypeVar("Number", int, float)


class Pace:
    """No time budget. The base class of `TimeBudget`."""

    seconds_left = math.inf
    is_used_up = False

    def over(self, schedule: Callable[[float], Number]) -> Callable[[float], Number]:
        """The schedule of a run at this pace, by step."""
        return schedule

    def begin(self, elapsed: float, evaluations: float, recorded: Mapping[int, float] = MappingProxyType({})) -> None:
        """Begin or resume the training.

        Args:
            elapsed: seconds of the training so far.
            evaluations: expected seconds of both evaluations, before and after the training.
            recorded: the elapsed seconds after steps that an interrupted run has recorded and the resumed one repeats.
        """

    def after(self, step: int, metrics: dict[str, float], team: Team) -> float:
        """The elapsed seconds after a step and its evaluation, which become a metric. Every rank calls it."""
        return 0.0


class TimeBudget(Pace):
    """Training within a time.

    The place in a schedule is max(step, 1 + steps * elapsed / available): the step, or the share of the time if the
    machine is too slow for all steps. The elapsed seconds change between steps only and are a metric of each step, so
    a resumed run repeats the places and the end of the steps that the interrupted one has recorded.
    """

    def __init__(self, seconds: float, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            seconds: of the training with its evaluations.
            steps: number of steps of the schedules.
            clock: in seconds.
        """
        self.seconds, self.steps, self._clock = seconds, steps, clock
        self.begin(0.0, 0.0)

    def begin(self, elapsed: float, evaluations: float, recorded: Mapping[int, float] = MappingProxyType({})) -> None:
        """Half of the time is for training also if the evaluations need more than the other half."""
        self.available = max(self.seconds - evaluations, self.seconds / 2)
        self._elapsed, self._recorded = elapsed, recorded
        self._zero = self._clock() - elapsed

    @property
    def seconds_left(self) -> float:  # type: ignore[override]
        """Of the training."""
        return max(self.available - self._elapsed, 0.0)

    @property
    def is_used_up(self) -> bool:  # type: ignore[override]
        """Whether the time is used up."""
        return self._elapsed >= self.available

    def over(self, schedule: Callable[[float], Number]) -> Callable[[float], Number]:
        """The schedule by step, at the place of the step or of the time."""
        return lambda step: schedule(max(step, min(1 + self.steps * self._elapsed / self.available, self.steps)))

    def after(self, step: int, metrics: dict[str, float], team: Team) -> float:
        """As in `Pace`; the clock of rank 0 counts."""
        self._elapsed = exchange_json(team, self._recorded.get(step, self._clock() - self._zero))[0]
        self._zero = self._clock() - self._elapsed
        metrics[METRIC] = self._elapsed
        return self._elapsed
