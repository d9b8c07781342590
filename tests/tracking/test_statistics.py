"""Intervals and pass@k against numbers from elsewhere."""

import math
from itertools import combinations

import numpy as np
import pytest

from covey.tracking.statistics import (
    accuracy,
    best_at_k,
    mean_fraction,
    mean_score,
    pass_at_k,
    t_quantile_95,
    wilson_interval,
)


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


def test_an_accuracy_has_wilsons_interval() -> None:
    result = accuracy([1.0, 0.0, 0.0, 1.0])
    assert (result["low"], result["high"]) == wilson_interval(2, 4)
    assert (result["score"], result["count"]) == (0.5, 4)
    for scores in ([0.5, 1.0], []):
        with pytest.raises(ValueError, match="needs scores, each 0 or 1"):
            accuracy(scores)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # Fisher and Yates, "Statistical Tables" (1938), table III, P = 0.05
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (29, 2.045), (120, 1.980)],
)
def test_the_t_distribution_agrees_with_its_table(degrees: int, quantile: float) -> None:
    assert t_quantile_95(degrees) == pytest.approx(quantile, abs=5e-4)


def test_the_t_quantile_goes_on_where_the_series_ends() -> None:
    assert t_quantile_95(1001) == pytest.approx(t_quantile_95(1000), abs=3e-6)
    assert t_quantile_95(1001) < t_quantile_95(1000)
    with pytest.raises(ValueError, match="at least one degree"):
        t_quantile_95(0)


def test_a_mean_score_has_the_t_interval_at_any_magnitude() -> None:
    for scale in (1.0, 1e-6, 3900.0, -2.5, 1e300):  # 2, 3, 7: mean 4, deviation sqrt(7)
        result = mean_score([2 * scale, 3 * scale, 7 * scale])
        half = 4.302653 * math.sqrt(7) / math.sqrt(3) * abs(scale)
        assert result["score"] == pytest.approx(4 * scale)
        assert (result["low"], result["high"]) == pytest.approx((4 * scale - half, 4 * scale + half), rel=1e-5)
    assert mean_score([0.0, 1.0])["high"] > 1, "0 and 1 do not make it an accuracy"
    assert [mean_score([0.0, 1.0], (0, 1))[bound] for bound in ("low", "high")] == [0, 1]
    assert mean_score([39.0]) == {"score": 39.0, "low": None, "high": None, "count": 1}
    assert mean_score([0.0, 0.0]) == {"score": 0.0, "low": 0.0, "high": 0.0, "count": 2}
    with pytest.raises(ValueError, match="at least one score"):
        mean_score([])


def test_the_t_interval_holds_the_mean_of_few_scores_in_95_of_100_samples() -> None:
    samples = np.random.default_rng(5).normal(3.0, 2.0, (2000, 5))
    held = sum(found["low"] <= 3.0 <= found["high"] for found in map(mean_score, samples.tolist()))
    assert abs(held - 1900) < 3 * math.sqrt(2000 * 0.95 * 0.05)


def test_shares_stay_inside_the_unit_interval_and_are_never_certain() -> None:
    assert mean_fraction([0.0, 0.25, 0.0])["low"] == 0.0
    assert mean_fraction([0.2, 0.4, 0.6]) == mean_score([0.2, 0.4, 0.6]) | {"low": 0.0}
    for shares in ([0.0], [1.0, 1.0], [0.5] * 4):
        found = mean_fraction(shares)
        assert (found["low"], found["high"]) == wilson_interval(sum(shares), len(shares))


def test_best_at_k_is_the_mean_of_the_best_over_all_draws() -> None:
    scores = [-3.0, 0.5, 0.5, 2.0, 7.25]
    for k in range(1, 6):
        draws = list(combinations(scores, k))
        assert best_at_k(scores, k) == pytest.approx(sum(map(max, draws)) / len(draws))
    assert best_at_k([1.0, 0.0, 0.0, 1.0, 0.0], 2) == pytest.approx(pass_at_k(5, 2, 2))
    with pytest.raises(ValueError, match="1 <= k <= n"):
        best_at_k([1.0], 2)
