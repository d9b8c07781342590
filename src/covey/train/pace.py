"""The time budget of a training."""

import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from covey.core.schedules import Number
from covey.data import Team
from covey.runtime.distributed import exchange_json

METRIC = "time/elapsed"


class Pace:
    """No time budget. The base class of `TimeBudget`."""

    seconds_left = math.inf
    is_used_up = False

    def over(self, schedule: Callable[[float], Number]) -> Callable[[float], Number]:
        """The schedule of a run at this pace, by step."""
        return schedule

    def begin(
        self,
        elapsed: float,
        evaluations: float,
        recorded: Mapping[int, float] = MappingProxyType({}),
        restarted: float = 0.0,
    ) -> None:
        """Begin or resume the training.

        Args:
            elapsed: seconds of the training so far.
            evaluations: expected seconds of both evaluations, before and after the training.
            recorded: the elapsed seconds after steps that an interrupted run has recorded and the resumed one repeats.
            restarted: the elapsed seconds when the schedules began last.
        """

    def after(self, step: int, metrics: dict[str, float], team: Team) -> float:
        """The elapsed seconds after a step and its evaluation, which become a metric. Every rank calls it."""
        return 0.0


def training_seconds(budget: float, evaluations: float) -> float:
    """Of a budget, the seconds for training: at least half, also if the evaluations need more than the other half."""
    return max(budget - evaluations, budget / 2)


class TimeBudget(Pace):
    """Training within a time.

    The place in a schedule is max(step, 1 + steps * elapsed / available): the step, or the share of the time if the
    machine is too slow for all steps. After a restart of the schedules steps and times count from there. The elapsed
    seconds change between steps only and are a metric of each step, so a resumed run repeats the places and the end of
    the steps that the interrupted one has recorded.
    """

    def __init__(
        self, seconds: float, steps: int, clock: Callable[[], float] = time.monotonic, restart: int = 0
    ) -> None:
        """
        Args:
            seconds: of the training with its evaluations.
            steps: number of steps of the schedules.
            clock: in seconds.
            restart: the step after which the schedules begin last.
        """
        self.seconds, self.steps, self.restart, self._clock = seconds, steps, restart, clock
        self.begin(0.0, 0.0)

    def begin(
        self,
        elapsed: float,
        evaluations: float,
        recorded: Mapping[int, float] = MappingProxyType({}),
        restarted: float = 0.0,
    ) -> None:
        self.available = training_seconds(self.seconds, evaluations)
        self._elapsed, self._recorded, self._restarted = elapsed, recorded, restarted
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

        def paced(step: float) -> Number:
            is_last = step > self.restart
            first, last, before = (self.restart, self.steps, self._restarted) if is_last else (0, self.restart, 0.0)
            place = (last - first) * (self._elapsed - before) / (self.available - before)
            return schedule(max(step, min(first + 1 + place, last)))

        return paced

    def after(self, step: int, metrics: dict[str, float], team: Team) -> float:
        """As in `Pace`; the clock of rank 0 counts."""
        self._elapsed = exchange_json(team, self._recorded.get(step, self._clock() - self._zero))[0]
        self._zero = self._clock() - self._elapsed
        if step == self.restart:
            self._restarted = self._elapsed
        metrics[METRIC] = self._elapsed
        return self._elapsed
