"""How sure a measured mean is: intervals for accuracies and returns, and pass@k without bias."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959963984540054  # the standard normal's 97.5 % point
BOOTSTRAP_DRAWS = 10_000
DRAWN_AT_ONCE = 1_000_000  # values, to bound the memory


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a share: `successes` out of `n` independent tries.

    Unlike share ± z * standard error it never leaves [0, 1] and stays honest near 0 and 1 and for few tries.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), 209-212.

    Args:
        successes: how many tries succeeded.
        n: how many tries there were.
        z: half-width in standard deviations; the default gives 95 %.

    Returns:
        (low, high); (0, 1) when nothing was tried.

    Raises:
        ValueError: unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n (are {successes} of {n})")
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
    return (0.0 if successes == 0 else low), (1.0 if successes == n else high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k answers is right, estimated from c right ones among n.

    1 - C(n - c, k) / C(n, k), as a product so that no large binomial appears. Unbiased, where 1 - (1 - c/n)^k is not.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"need 0 <= c <= n and 1 <= k <= n (n {n}, c {c}, k {k})")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def bootstrap_interval(values: Sequence[float], seed: int = 0, draws: int = BOOTSTRAP_DRAWS) -> tuple[float, float]:
    """A 95 % percentile bootstrap interval of the mean of `values`, one value per independent problem or episode.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13.

    Args:
        values: one number a problem; several answers to one problem are not independent, so average them first.
        seed: the same seed gives the same interval.
        draws: how often the problems are drawn anew, with replacement.

    Returns:
        (low, high). When all values are equal there is no spread to resample and both are that value.

    Raises:
        ValueError: if there are no values.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("the bootstrap needs at least one value")
    generator = np.random.default_rng(seed)
    at_once = max(1, DRAWN_AT_ONCE // data.size)
    means = np.concatenate(
        [
            data[generator.integers(0, data.size, (min(at_once, draws - done), data.size))].mean(axis=1)
            for done in range(0, draws, at_once)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def mean_score(scores: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The mean of independent scores with its 95 % interval, as `summary.json` holds it.

    A score is what one problem (1 right, 0 wrong) or one episode (its return) came to. Where all are 0 or 1 the
    interval is Wilson's, else the bootstrap's.

    >>> mean_score([1, 1, 0, 0])
    {'score': 0.5, 'low': 0.15003898915214947, 'high': 0.8499610108478506, 'count': 4}
    """
    count = len(scores)
    if set(scores) <= {0, 1}:
        low, high = wilson_interval(int(sum(scores)), count)
    else:
        low, high = bootstrap_interval(scores, seed)
    return {"score": float(sum(scores)) / max(count, 1), "low": low, "high": high, "count": count}
