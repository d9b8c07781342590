"""Curves of a run with a bounded number of points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from covey.tracking.metric_table import MetricTable

FEWEST_POINTS, MOST_POINTS, POINTS = 2, 5000, 600


def curves(
    table: MetricTable, names: Sequence[str] | None, points: int, after: int, last: int | None
) -> dict[str, Any]:
    """Metrics of the steps after `after` up to `last`, in at most `points` buckets of about equal numbers of steps.

    Args:
        names: the metrics, without which all; unknown ones are left out.
    """
    steps = np.array(table.steps, np.int64)
    begin = int(np.searchsorted(steps, after, "right"))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
    count = max(0, end - begin)
    edges = begin + np.arange(min(points, count)) * count // max(1, min(points, count))  # first place of each bucket
    is_downsampled = count > points
    chosen = table.columns if names is None else [name for name in dict.fromkeys(names) if name in table.columns]
    series = {}
    for name in chosen:
        values = np.array(table.columns[name], np.float64)[:end]
        series[name] = _buckets(values, edges) if is_downsampled else {"mean": _plain(values[begin:])}
    lasts = np.append(edges[1:], end) - 1 if count else edges
    return {
        "last_step": table.last_step,
        "generation": table.generation,
        "downsampled": is_downsampled,
        "steps": steps[lasts].tolist(),
        "first_steps": steps[edges].tolist(),
        "series": series,
    }


def _buckets(values: np.ndarray, edges: np.ndarray) -> dict[str, list[float | None]]:
    """Mean, least and largest finite value of each bucket; None for a bucket without any."""
    values = np.where(np.isfinite(values), values, np.nan)
    counts = np.add.reduceat(~np.isnan(values), edges, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = np.add.reduceat(np.nan_to_num(values), edges) / counts
    return {
        "mean": _plain(means),
        "low": _plain(np.fmin.reduceat(values, edges)),
        "high": _plain(np.fmax.reduceat(values, edges)),
    }


def _plain(values: np.ndarray) -> list[float | None]:
    return [value if finite else None for value, finite in zip(values.tolist(), np.isfinite(values), strict=True)]
