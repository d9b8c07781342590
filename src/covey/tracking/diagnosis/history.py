"""The metrics of a run in bounded windows: the first values of each metric and the last ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

START = 5  # values of a metric that its start is estimated from
RECENT = 10  # last values that its present level is estimated from
KEPT = 60  # last values that are kept
SETTLED = START + 2 * RECENT  # values before which no level is compared with the start

MAD_TO_STD = 1.4826  # of a normal distribution
MEDIAN_TO_MEAN = 1.2533  # standard error of a median, relative to that of a mean


class Series:
    """One metric: its first values, its last values with their steps, its sum and its number of values."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.steps: deque[int] = deque(maxlen=KEPT)
        self.last: deque[float] = deque(maxlen=KEPT)
        self.count = 0
        self.total = 0.0

    def add(self, step: int, value: float) -> None:
        if len(self.first) < START:
            self.first.append(value)
        self.steps.append(step)
        self.last.append(value)
        self.count += 1
        self.total += value


class History:
    """The metrics of the steps so far. Memory and the time of `add` do not grow with the number of steps."""

    def __init__(self, names: Iterable[str]) -> None:
        self.series = {name: Series() for name in names}
        self.step = 0
        self.steps = 0  # number of recorded steps

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add a step; a value that is None or not finite is left out."""
        self.step = step
        self.steps += 1
        for name, series in self.series.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                series.add(step, value)

    def count(self, name: str) -> int:
        """Number of values of a metric."""
        return self.series[name].count if name in self.series else 0

    def total(self, name: str) -> float:
        """Sum of all values of a metric."""
        return self.series[name].total if name in self.series else 0.0

    def recent(self, name: str, size: int = RECENT) -> Sequence[float]:
        """The last `size` values of a metric."""
        values = self.series[name].last if name in self.series else ()
        return list(values)[-size:]

    def since(self, name: str, size: int = RECENT) -> int:
        """The step of the first of the last `size` values."""
        return list(self.series[name].steps)[-size:][0]

    def level(self, name: str) -> float | None:
        """Median of the last values; None before there are enough."""
        values = self.recent(name)
        return median(values) if len(values) == RECENT else None

    def start(self, name: str) -> float | None:
        """Median of the first values; None until the last values are apart from them."""
        return median(self.series[name].first) if self.count(name) >= SETTLED else None
