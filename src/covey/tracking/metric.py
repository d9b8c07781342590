"""The definition of a metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One number of a training step."""

    name: str  # a part in <angle brackets> is a placeholder
    unit: str
    meaning: str
    healthy: str  # the values in a healthy run
    reproducible: bool = True  # False: it depends on the clock or on the machine
