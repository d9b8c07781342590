"""The picture of an iterative run, `iterations.png`: true reward, proxy reward, quality of the reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from covey.tracking.curve import EVALUATION, MUTED, SMALL, TRAINING, RunFigure, decorate, draw_series, points_of
from covey.tracking.run_folder import write_atomically
from covey.tracking.run_reader import RunReader
from covey.tracking.run_store import read_metrics

ITERATIONS_PICTURE = "iterations.png"


def read_iterations(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of the iterations of a run that have ended, in order."""
    return RunReader(Path(run_dir)).iterations()


def draw_iterations(run_dir: str | Path) -> Path | None:
    """Draw the picture; returns its path, or None if no iteration has ended.

    Raises:
        ConfigError: if the run has no metrics.
    """
    run_dir = Path(run_dir)
    iterations = read_iterations(run_dir)
    if not iterations:
        return None
    steps = read_metrics(run_dir)
    figure = RunFigure(figsize=(9, 7.2), dpi=160, facecolor="white", layout="constrained")
    true, proxy, quality = figure.subplots(3, 1, sharex=True)
    ends = [record["step"] for record in iterations]
    panels = ((true, "score/mean", "true reward (verifier)", TRAINING),
              (proxy, f"reward/{iterations[0]['reward']}", "proxy reward (reward model)", SMALL))  # fmt: skip
    for axes, metric, label, color in panels:
        decorate(axes, "mean of a step")
        axes.set_title(label, loc="left", fontsize=11)
        draw_series(axes, *points_of(steps, metric, "step"), color)
        for end in ends:
            axes.axvline(end, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
    _draw_quality(quality, iterations)
    picture = run_dir / ITERATIONS_PICTURE
    write_atomically(picture, figure._repr_png_())
    return picture


def _draw_quality(axes: Axes, iterations: Sequence[dict[str, Any]]) -> None:
    """Draw the order of right and wrong completions before and after each training of the reward model."""
    decorate(axes, "right above wrong")
    axes.set_title("reward model on samples of the current policy: rank agreement", loc="left", fontsize=11)
    axes.set_xlabel("training step; dashed: end of an iteration", color=MUTED, fontsize=9)
    axes.axhline(0.5, color=MUTED, linewidth=0.8)
    for when, color, label in (("before", EVALUATION, "before its training"), ("after", TRAINING, "after it")):
        known = [
            (record["step"], record[when]["rank_agreement"])
            for record in iterations
            if "rank_agreement" in record[when]
        ]
        axes.plot(
            [x for x, _ in known], [y for _, y in known], "o-", color=color, markersize=5, linewidth=1.2, label=label
        )
    axes.set_ylim(0, 1)
    axes.legend(loc="lower left", frameon=False, fontsize=9)
