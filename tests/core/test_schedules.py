"""Schedules: their values by hand, at the ends and across the warm-up."""

import math

import pytest

from covey.core.schedules import adaptive_entropy_value, adaptive_kl_coefficient, constant, cosine, linear
from covey.runtime.optimizer import learning_rate_schedule


def values(schedule, steps):
    return [schedule(step) for step in range(1, steps + 1)]


def test_constant():
    assert values(constant(0.3), 3) == [0.3] * 3


def test_warmup_by_hand():
    # 2 * 1/4, 2 * 2/4, 2 * 3/4, then 2
    assert values(constant(2.0, warmup_steps=4), 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_by_hand():
    # 4 steps: 5-1, 5-2, 5-3, 5-4 fifths of 10
    assert values(linear(10.0, steps=4), 4) == pytest.approx([8.0, 6.0, 4.0, 2.0])


def test_linear_with_warmup_by_hand():
    # warm-up 10 * 1/2, 10 * 2/2; then (5 - 3)/(5 - 2), (5 - 4)/(5 - 2) of 10
    assert values(linear(10.0, steps=4, warmup_steps=2), 4) == pytest.approx([5.0, 10.0, 20 / 3, 10 / 3])


def test_cosine_by_hand():
    # 3 steps: p = 1/4, 2/4, 3/4; (1 + cos(pi p))/2 = 0.853553, 0.5, 0.146447
    assert values(cosine(1.0, steps=3), 3) == pytest.approx([0.853553, 0.5, 0.146447], abs=1e-6)


def test_cosine_with_warmup_by_hand():
    # warm-up 1/1; then p = 1/3, 2/3: (1 + 1/2)/2 = 0.75, (1 - 1/2)/2 = 0.25
    assert values(cosine(1.0, steps=3, warmup_steps=1), 3) == pytest.approx([1.0, 0.75, 0.25])


@pytest.mark.parametrize("schedule", [linear, cosine])
@pytest.mark.parametrize("warmup_steps", [0, 3, 20])
def test_every_step_learns_and_none_exceeds_the_peak(schedule, warmup_steps):
    made = values(schedule(1.0, steps=20, warmup_steps=warmup_steps), 20)
    assert all(0 < value <= 1 for value in made)
    assert made[:warmup_steps] == pytest.approx([step / warmup_steps for step in range(1, warmup_steps + 1)])
    assert all(later < earlier for earlier, later in zip(made[warmup_steps:], made[warmup_steps + 1 :], strict=False))


def test_a_falling_schedule_begins_again_at_the_peak_without_warmup():
    # warm-up 3/2, 3; then (4 - 3)/(4 - 2) of 3; from the peak 3 over two steps: 3 * 2/3, 3 * 1/3; one step: 3 * 1/2
    made = learning_rate_schedule("linear", 3.0, steps=6, warmup_steps=2, restarts=(3, 5))
    assert values(made, 6) == pytest.approx([1.5, 3.0, 1.5, 2.0, 1.0, 1.5])
    assert values(learning_rate_schedule("constant", 3.0, steps=6, warmup_steps=2, restarts=(3, 5)), 6)[1:] == [3.0] * 5


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_steps_beyond_the_last_are_never_negative(schedule):
    made = values(schedule(1.0, steps=3), 8)
    assert made[3:] == pytest.approx([0.0] * 5)
    assert all(math.isfinite(value) for value in made)


# ---- the KL coefficient that follows a target ----


@pytest.mark.parametrize(
    ("kl", "rollouts", "expected"),
    [
        (0.11, 100, 0.0505),  # 0.05 * (1 + 0.1 * 100 / 1000)
        (0.09, 100, 0.0495),  # 0.05 * (1 - 0.1 * 100 / 1000)
        (0.10, 100, 0.05),
        (0.50, 100, 0.051),  # four times beyond: counts as a fifth. 0.05 * (1 + 0.2 * 0.1)
        (0.00, 100, 0.049),
        (math.inf, 100, 0.051),
        (0.11, 500, 0.0525),  # 0.05 * (1 + 0.1 * 0.5)
    ],
)
def test_toward_target_by_hand(kl, rollouts, expected):
    assert adaptive_kl_coefficient(0.05, kl, target=0.1, horizon=1000, rollouts=rollouts) == pytest.approx(expected)


def test_a_step_of_many_horizons_moves_the_coefficient_by_a_fifth_and_never_below_zero():
    assert adaptive_kl_coefficient(0.05, 0.0, target=0.1, horizon=10, rollouts=1000) == pytest.approx(0.04)
    assert adaptive_kl_coefficient(0.05, 9.0, target=0.1, horizon=10, rollouts=1000) == pytest.approx(0.06)


def test_a_horizon_of_a_kl_that_is_off_by_a_fifth_moves_the_coefficient_by_about_a_fifth():
    coefficient = 1.0
    for _ in range(100):
        coefficient = adaptive_kl_coefficient(coefficient, 0.2, target=0.1, horizon=6400, rollouts=64)
    assert coefficient == pytest.approx(math.exp(0.2), rel=1e-3)


def test_the_controller_finds_the_coefficient_of_a_kl_that_answers_to_it():
    coefficient = 1.0
    for _ in range(400):  # the KL is 0.02 / coefficient, so that a target of 0.1 asks for 0.2
        coefficient = adaptive_kl_coefficient(coefficient, 0.02 / coefficient, target=0.1, horizon=1000, rollouts=100)
    assert coefficient == pytest.approx(0.2, rel=1e-3)


# ---- what holds the entropy at a target ----

WIDE = {"low": 1e-9, "high": 1e9}


@pytest.mark.parametrize(
    ("entropy", "target", "exponent"),
    [
        (0.5, 0.5, 0.0),
        (0.4, 0.5, 0.2 * 0.2),  # a fifth too low
        (0.6, 0.5, 0.2 * -0.2),
        (0.0, 0.5, 0.2),
        (9.0, 0.5, -0.2),  # far too high counts as the target's size
        (-3.0, -2.0, 0.2 * 0.5),  # continuous actions: -3 is below -2
        (-1.0, -2.0, 0.2 * -0.5),
    ],
)
def test_toward_the_entropy_by_hand(entropy, target, exponent):
    found = adaptive_entropy_value(0.01, entropy, target=target, gain=0.2, **WIDE)
    assert found == pytest.approx(0.01 * math.exp(exponent))


def test_the_value_stays_within_its_bounds():
    assert adaptive_entropy_value(0.01, 0.0, target=1.0, gain=1.0, low=0.001, high=0.02) == 0.02
    assert adaptive_entropy_value(0.01, 9.0, target=1.0, gain=1.0, low=0.005, high=0.02) == 0.005


@pytest.mark.parametrize("start", [0.01, 10.0])
def test_the_controller_finds_the_value_of_an_entropy_that_answers_to_it(start):
    value = start
    for _ in range(400):  # an entropy of 0.6 needs the value 0.36
        value = adaptive_entropy_value(value, math.sqrt(value), target=0.6, gain=0.2, **WIDE)
    assert value == pytest.approx(0.36, rel=1e-3)
