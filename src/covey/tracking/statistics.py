"""Confidence intervals of accuracies, scores and returns; unbiased pass@k and best@k."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

Estimate = dict[str, Any]  # {"score": float, "low": float | None, "high": float | None, "count": int}

Z_95 = 1.959963984540054  # the standard normal's 97.5 % point


def wilson_interval(successes: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion: `successes` out of `n` independent trials.

    Unlike proportion ± z * standard error it is within [0, 1], and accurate near 0 and 1 and for few trials.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), 209-212.

    Args:
        successes: number of successful trials.
        n: number of trials.
        z: half-width in standard deviations; the default gives 95 %.

    Returns:
        (low, high); (0, 1) for n = 0.

    Raises:
        ValueError: unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n (are {successes} of {n})")
    if n == 0:
        return 0.0, 1.0
    proportion = successes / n
    middle = proportion + z * z / (2 * n)
    spread = z * math.sqrt(proportion * (1 - proportion) / n + z * z / (4 * n * n))
    low, high = (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
    return (0.0 if successes == 0 else low), (1.0 if successes == n else high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k answers is right, estimated from c right ones among n.

    1 - C(n - c, k) / C(n, k), as a product so that no large binomial appears. Unbiased, where 1 - (1 - c/n)^k is not.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    import numpy as np  # its import takes longer than that of the whole command line

    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"need 0 <= c <= n and 1 <= k <= n (n {n}, c {c}, k {k})")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def best_at_k(scores: Sequence[float], k: int) -> float:
    """The expected best score of k answers, estimated from the scores of n >= k answers to one problem.

    sum_i C(i - 1, k - 1) / C(n, k) * x_(i), with x_(1) <= ... <= x_(n): the mean of the maximum over all subsets of k.
    For scores of 0 or 1 it is `pass_at_k`; for k = 1 it is the mean.

    Raises:
        ValueError: unless 1 <= k <= n.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"need 1 <= k <= n (n {n}, k {k})")
    subsets = math.comb(n, k)
    return math.fsum(math.comb(i, k - 1) / subsets * x for i, x in enumerate(sorted(scores)))


@cache
def t_quantile_95(degrees: int) -> float:
    """The 97.5 % point of Student's t distribution: half the width of a 95 % interval in standard errors.

    By bisection on the finite series of its distribution function.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 26.7.3 and 26.7.4.

    Raises:
        ValueError: for less than one degree of freedom.
    """
    if degrees < 1:
        raise ValueError(f"the t distribution needs at least one degree of freedom (is {degrees})")
    if degrees > 1000:  # the series grows with the degrees; here the next term is below 1e-9
        cubic, quintic = Z_95**3 + Z_95, 5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95
        return Z_95 + cubic / (4 * degrees) + quintic / (96 * degrees**2)
    low, high = 0.0, 20.0  # 12.706 with one degree of freedom
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def _t_inside(t: float, degrees: int) -> float:
    """The probability that |T| <= t."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = total = cosine if odd else 1.0
    if degrees == 1:
        total = 0.0
    for i in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def accuracy(scores: Sequence[float]) -> Estimate:
    """The fraction of right answers with its Wilson interval, in the form of `summary.json`.

    >>> accuracy([1, 1, 0, 0])
    {'score': 0.5, 'low': 0.15003898915214947, 'high': 0.8499610108478506, 'count': 4}

    Raises:
        ValueError: for a score that is neither 0 nor 1, or for none.
    """
    if not scores or not set(scores) <= {0, 1}:
        raise ValueError("an accuracy needs scores, each 0 or 1")
    low, high = wilson_interval(int(sum(scores)), len(scores))
    return {"score": float(sum(scores)) / len(scores), "low": low, "high": high, "count": len(scores)}


def mean_score(scores: Sequence[float], limits: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """The mean of independent scores with its 95 % t interval, in the form of `summary.json`.

    There is one score for each problem, or one return for each episode. The interval of a single score is None. It is
    clipped to `limits`, which no score exceeds.

    >>> mean_score([1.0, 2.0, 3.0])["low"]
    -0.4841377117186747

    Raises:
        ValueError: if there are no scores.
    """
    count = len(scores)
    if not count:
        raise ValueError("a mean needs at least one score")
    scale = 2.0 ** math.frexp(max(abs(score) for score in scores))[1] or 1.0  # the squares of large scores overflow
    mean = math.fsum(score / scale for score in scores) / count
    if count == 1:
        return {"score": mean * scale, "low": None, "high": None, "count": 1}
    deviation = math.sqrt(math.fsum((score / scale - mean) ** 2 for score in scores) / (count - 1))
    half = t_quantile_95(count - 1) * deviation / math.sqrt(count) * scale
    mean *= scale
    return {"score": mean, "low": max(mean - half, limits[0]), "high": min(mean + half, limits[1]), "count": count}


def mean_fraction(fractions: Sequence[float]) -> Estimate:
    """The mean of independent probabilities, such as pass@k of each problem, with a 95 % interval inside [0, 1].

    The t interval, clipped to [0, 1]. If all values are equal, or there is one, Wilson's interval with their sum as the
    number of successes. It is conservative: a variable in [0, 1] has at most the variance of a Bernoulli variable.

    Raises:
        ValueError: if there are none.
    """
    found = mean_score(fractions, (0.0, 1.0))
    if len(set(fractions)) > 1:
        return found
    low, high = wilson_interval(math.fsum(fractions), len(fractions))
    return found | {"low": low, "high": high}
