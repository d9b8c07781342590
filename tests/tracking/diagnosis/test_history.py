"""Windows, standard errors and the highest level, by hand."""

import math

import pytest

from covey.tracking.diagnosis.history import KEPT, RECENT, SETTLED, START, History, error_of, in_errors


def history_of(*values: float | None, name: str = "score/mean") -> History:
    history = History([name, "reward/mean"])
    for step, value in enumerate(values, start=1):
        history.add(step, {name: value, "reward/mean": float(step)})
    return history


def test_the_level_is_the_median_of_the_last_values():
    history = history_of(*[100.0] * 5, *range(10))
    assert history.level("score/mean") == 4.5
    assert history.level("score/mean", skip=5) == (4 + 100) / 2  # of 100 five times, and 0 to 4
    assert history_of(*range(9)).level("score/mean") is None


def test_the_start_is_the_median_of_the_first_values_once_there_are_enough():
    assert history_of(3.0, 1.0, 2.0, 9.0, 8.0, *[50.0] * 15).start("score/mean") == 3.0
    assert history_of(*[1.0] * (SETTLED - 1)).start("score/mean") is None


def test_values_that_are_missing_or_not_finite_are_left_out():
    history = history_of(None, 1.0, math.nan, 2.0, math.inf)
    assert list(history.of("score/mean").last) == [1.0, 2.0]
    assert (history.of("score/mean").count, history.of("score/mean").total) == (2, 3.0)
    assert history.steps == 5


def test_the_standard_error_of_a_median():
    # deviations from 3 are 2, 1, 0, 1, 2: the MAD is 1
    assert error_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.2533 * 1.4826 / math.sqrt(5))
    # the MAD is 0, the mean deviation 10 / 5
    assert error_of([1.0, 1.0, 1.0, 1.0, 11.0]) == pytest.approx(1.2533 * 1.2533 * 2 / math.sqrt(5))
    assert error_of([1.0] * 5) == 0.0


def test_a_difference_in_standard_errors():
    assert in_errors(10.0, 3.0, 4.0) == 2.0
    assert in_errors(-1.0, 0.0, 0.0) == -math.inf
    assert in_errors(0.0, 0.0, 0.0) == 0.0
    assert in_errors(1.0, math.inf, 1.0) == 0.0


def noisy(level: float, count: int) -> list[float]:
    """Values around a level whose deviations are 1: standard error 1.858 / sqrt(count)."""
    return [level + (-1) ** number for number in range(count)]


def test_a_rise_is_more_than_three_standard_errors():
    # the errors are 1.858 / sqrt(5) with a median 1 above, and 1.858 / sqrt(10)
    start, level = noisy(0.0, START), 10
    error = math.hypot(error_of(start), error_of(noisy(0.0, RECENT)))
    quiet = [0.0] * (SETTLED - START - RECENT)
    up = history_of(*start, *quiet, *noisy(1 + 3.01 * error, level))
    level_with = history_of(*start, *quiet, *noisy(1 + 2.99 * error, level))
    down = history_of(*start, *quiet, *noisy(1 - 3.01 * error, level))
    assert up.rises("score/mean")
    assert not level_with.rises("score/mean")
    assert down.falls("score/mean")
    assert not down.rises("score/mean")
    assert not level_with.falls("score/mean")


def test_a_score_stalls_if_it_gains_a_tenth_of_its_gain_since_the_start_or_less():
    assert history_of(*[0.0] * 10, *[1.0] * 10, *[1.1] * 10).stalls("score/mean")
    assert not history_of(*[0.0] * 10, *[1.0] * 10, *[1.12] * 10).stalls("score/mean")
    assert history_of(*[0.5] * 30).stalls("score/mean")
    assert history_of(*[0.0] * 10, *[1.0] * 10, *[0.5] * 10).stalls("score/mean")
    assert not history_of(*[0.5] * 19).stalls("score/mean")  # unknown


def test_the_best_level_keeps_its_step_and_the_reward():
    history = history_of(*[1.0] * 10)
    history.mark_best("score/mean")
    for step in range(11, 21):
        history.add(step, {"score/mean": 0.5, "reward/mean": 99.0})
    history.mark_best("score/mean")
    best = history.of("score/mean").best
    assert best is not None
    assert (best.value, best.step, best.reward) == (1.0, 10, 5.5)
    assert history.loss_of_best("score/mean") == math.inf  # no noise


def test_memory_is_bounded():
    history = history_of(*map(float, range(1000)))
    assert len(history.of("score/mean").last) == KEPT
    assert len(history.of("score/mean").first) == START
