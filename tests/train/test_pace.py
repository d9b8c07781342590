"""The time budget: places in schedules, the end, and their repetition after an interruption."""

import math

import pytest

from covey.core.schedules import linear
from covey.data import Team
from covey.runtime.distributed import ALONE
from covey.train.pace import METRIC, Pace, TimeBudget


class FakeClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def after(pace: Pace, clock: FakeClock, step: int, seconds: float) -> dict[str, float]:
    """A step that takes so many seconds."""
    clock.now += seconds
    metrics: dict[str, float] = {}
    assert pace.after(step, metrics, ALONE) == metrics.get(METRIC, 0.0)
    return metrics


@pytest.mark.parametrize(
    ("seconds", "place"),
    [(0.0, 3.0), (8.0, 3.0), (16.0, 3.0), (20.0, 3.5), (40.0, 6.0), (72.0, 10.0), (79.0, 10.0), (500.0, 10.0)],
)
def test_the_place_in_a_schedule_is_that_of_the_step_or_of_the_time(seconds: float, place: float) -> None:
    clock = FakeClock()
    pace = TimeBudget(100.0, 10, clock)
    pace.begin(0.0, evaluations=20.0)
    assert after(pace, clock, 2, seconds) == {METRIC: seconds}
    assert pace.over(lambda place: place)(3) == pytest.approx(place)
    assert pace.over(linear(1.0, steps=10))(3) == pytest.approx((11 - place) / 11)
    assert pace.seconds_left == max(80.0 - seconds, 0.0)
    assert pace.is_used_up == (seconds >= 80.0)


def test_a_resumed_run_repeats_what_was_recorded_and_then_goes_on_from_there() -> None:
    clock = FakeClock()
    pace = TimeBudget(100.0, 10, clock)
    clock.now += 3600
    pace.begin(30.0, 20.0, {4: 37.0, 5: 39.5})
    assert [after(pace, clock, step, 2.0)[METRIC] for step in (4, 5, 6, 7)] == [37.0, 39.5, 41.5, 43.5]


def test_an_interruption_does_not_count() -> None:
    clock = FakeClock()
    pace = TimeBudget(100.0, 10, clock)
    clock.now += 3600
    pace.begin(30.0, 20.0)
    assert after(pace, clock, 4, 2.0) == {METRIC: 32.0}


def test_half_of_the_time_is_for_training_if_evaluations_need_more() -> None:
    pace = TimeBudget(100.0, 10, FakeClock())
    pace.begin(0.0, evaluations=90.0)
    assert pace.seconds_left == 50.0


@pytest.mark.parametrize("resumed", [False, True])
def test_after_a_restart_steps_and_times_count_from_there(resumed: bool) -> None:
    """40 s of 80 s are left for the 6 steps after step 4, so 20 s are half of them."""
    clock = FakeClock()
    pace = TimeBudget(100.0, 10, clock, restart=4)
    pace.begin(0.0, 20.0)
    after(pace, clock, 4, 40.0)
    assert pace.over(lambda place: place)(5) == 5
    after(pace, clock, 5, 20.0)
    if resumed:
        pace = TimeBudget(100.0, 10, clock, restart=4)
        pace.begin(60.0, 20.0, {}, 40.0)
    assert pace.over(lambda place: place)(6) == pytest.approx(4 + 1 + 6 * 20 / 40)
    assert pace.over(lambda place: place)(3) == pytest.approx(min(1 + 4 * 60 / 80, 4))


def test_without_a_budget_nothing_changes() -> None:
    pace, schedule = Pace(), linear(1.0, steps=10)
    pace.begin(5.0, 5.0, {1: 2.0})
    assert after(pace, FakeClock(), 1, 1e9) == {}
    assert (pace.over(schedule), pace.is_used_up, pace.seconds_left) == (schedule, False, math.inf)


class Rank(Team):
    """A rank that receives the time of rank 0."""

    rank, size = 1, 2

    def exchange(self, message: bytes) -> list[bytes]:
        return [b"12.5", message]


def test_the_clock_is_that_of_rank_0() -> None:
    pace = TimeBudget(100.0, 10, FakeClock())
    assert pace.after(1, {}, Rank()) == 12.5
