"""Intervals and pass@k against numbers from elsewhere."""

import math
from itertools import combinations

import numpy as np
import pytest

from covey.observe.statistics import bootstrap_interval, mean_score, pass_at_k, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_agrees_with_newcombe(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_is_symmetric_and_inside_the_unit_interval() -> None:
    for n in (1, 7, 100):
        for successes in range(n + 1):
            low, high = wilson_interval(successes, n)
            assert 0 <= low <= successes / n <= high <= 1
            assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="between 0 and n"):
        wilson_interval(5, 4)


def test_pass_at_k_counts_the_draws_that_hold_a_right_one() -> None:
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations(range(n), k))
                share = sum(min(draw) < c for draw in draws) / len(draws)
                assert pass_at_k(n, c, k) == pytest.approx(share)


def test_pass_at_k_survives_large_numbers() -> None:
    expected = 1 - math.comb(950, 100) / math.comb(1000, 100)
    assert pass_at_k(1000, 50, 100) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(4, 1, 5)


def test_bootstrap_is_repeatable_and_as_wide_as_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = bootstrap_interval(values, seed=4)
    assert (low, high) == bootstrap_interval(values, seed=4)
    assert (low, high) != bootstrap_interval(values, seed=5)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([])


def test_mean_score_chooses_the_interval_by_the_scores() -> None:
    result = mean_score([1.0, 0.0, 0.0, 1.0])
    assert (result["low"], result["high"]) == wilson_interval(2, 4)
    assert (result["score"], result["count"]) == (0.5, 4)
    partial = mean_score([0.5, 0.25, 0.75], seed=3)
    assert (partial["low"], partial["high"]) == bootstrap_interval([0.5, 0.25, 0.75], seed=3)
