"""Pictures: of a run, `curve.png`; of an iterative run, `iterations.png`; the reliability of a reward model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot, which would open windows and keep figures
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from covey.config.files import faults_of
from covey.tracking.run_folder import CURVE_FILE, write_atomically
from covey.tracking.run_reader import RunReader
from covey.tracking.run_store import read_metrics
from covey.tracking.wording import CONTROL, Panel, Wording, find_wording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
TRAINING, EVALUATION, SMALL = "#2563eb", "#c2410c", "#0f766e"
COLUMNS = 3  # small panels in a row
DRAWN_POINTS = 2_000  # of a longer series, the lowest and the highest of each stretch are drawn


class RunFigure(Figure):
    """The picture of a run. A notebook displays it, also without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def draw_curve(run_dir: str | Path) -> Path:
    """Write the picture of a run, `curve.png`; returns its path.

    Raises:
        ConfigError: if there is no metrics file.
    """
    path = Path(run_dir) / CURVE_FILE
    write_atomically(path, run_figure(run_dir)._repr_png_())
    return path


def run_figure(run_dir: str | Path) -> RunFigure:
    """The picture of a run: the score while training, the evaluations, and small panels of other metrics below.

    The x axis is training steps for a language model, environment steps in control. Reads `metrics.jsonl`, and
    `summary.json` or `stopped.json` if there is one: without them, a score is not shown as an accuracy. A run without
    a score shows its reward instead.

    Raises:
        ConfigError: if there is no metrics file.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir)
    summary = RunReader(run_dir).summary() or {}
    in_control = any(CONTROL.x_metric in record for record in records)
    by_metrics = ("control", "return") if in_control else ("language", "score")
    wording = find_wording(summary or dict(zip(("domain", "score_kind"), by_metrics, strict=True)))

    rows = -(-len(wording.panels) // COLUMNS)
    figure = RunFigure(figsize=(9, 4.4 + 1.7 * rows), dpi=160, facecolor="white", layout="constrained")
    grid = figure.add_gridspec(1 + rows, COLUMNS, height_ratios=(2.6, *[1] * rows))
    _draw_main(figure.add_subplot(grid[0, :]), records, summary, wording)
    for place, candidates in enumerate(wording.panels):
        row, column = divmod(place, COLUMNS)
        _draw_panel(figure.add_subplot(grid[1 + row, column]), records, candidates, wording)
    return figure


def points_of(records: Sequence[dict[str, Any]], name: str, x_metric: str) -> tuple[list[float], list[float]]:
    """The x values at which a metric was measured, and its values."""
    measured = [record for record in records if record.get(name) is not None]
    return [record[x_metric] for record in measured], [record[name] for record in measured]


def _draw_main(axes: Axes, records: Sequence[dict[str, Any]], summary: dict[str, Any], wording: Wording) -> None:
    """The large panel: the score."""
    has_scores = any(record.get("score/mean") is not None for record in records)
    name, label = ("score/mean", wording.kind.name) if has_scores else ("reward/mean", "reward")
    title = f"{summary['recipe']}: {label} while it trains" if "recipe" in summary else f"{label} while it trains"
    decorate(axes, label)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=12)
    axes.set_xlabel(wording.x_label, color=MUTED, fontsize=9)
    draw_series(
        axes, *points_of(records, name, wording.x_metric), TRAINING, f"training {label}, sampled (thin: each step)"
    )

    last = max((record[wording.x_metric] for record in records), default=1)
    checked = points_of(records, "eval/score", wording.x_metric)
    evaluations = summary.get("evaluations", [])
    results = [evaluations[0][when] for when in ("before", "after") if when in evaluations[0]] if evaluations else []
    if checked[0]:
        before = [result["score"] for result in results[:1] if "before" in evaluations[0]]
        joined = [0.0 for _ in before] + checked[0], before + checked[1]
        axes.plot(*joined, "o-", color=EVALUATION, markersize=4, linewidth=0.9, zorder=4,
                  label=None if results else "evaluation")  # fmt: skip
    if results:
        _draw_before_after(axes, results, last, wording)
    if summary.get("expected_return") is not None:
        expected = summary["expected_return"]
        axes.axhline(expected, color=INK, linewidth=1, linestyle=(0, (5, 4)), zorder=1,
                     label=f"expected return, {wording.kind.write_label(expected)}")  # fmt: skip
    if has_scores:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: wording.kind.write_tick(value)))
        if wording.kind.limits:
            axes.set_ylim(wording.kind.limits)
    label_length = max((len(wording.kind.write_label(result["score"])) for result in results), default=3)
    margin = max(last * (0.03 + 0.014 * label_length), 0.5)
    axes.set_xlim(-margin, last + margin)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=wording.legend, frameon=False, fontsize=9, labelcolor=INK)


def _draw_before_after(axes: Axes, results: Sequence[dict[str, Any]], last: float, wording: Wording) -> None:
    """Draw the evaluations before and after training (of a stopped run before) with their intervals and values."""
    label = wording.evaluation.format(measured=wording.count_measured(results[-1]["count"]))
    label += " (95 % interval)" if results[-1]["low"] is not None else ""
    for x, result, side in zip((0, last), results, (-1, 1), strict=False):
        score = result["score"]
        if result["low"] is not None:
            axes.plot([x, x], [result["low"], result["high"]], color=EVALUATION, linewidth=2, zorder=5)
            axes.plot([x] * 2, [result["low"], result["high"]], "_", color=EVALUATION, markersize=9, zorder=5)
        axes.plot(x, score, "o", color=EVALUATION, markersize=9, markeredgecolor="white", zorder=6,
                  label=label if result is results[-1] else None)  # fmt: skip
        axes.annotate(wording.kind.write_label(score), (x, score), xytext=(9 * side, 0), textcoords="offset points",
                      va="center", ha="left" if side > 0 else "right", fontsize=12, fontweight="bold",
                      color=EVALUATION)  # fmt: skip


def _draw_panel(axes: Axes, records: Sequence[dict[str, Any]], candidates: Sequence[Panel], wording: Wording) -> None:
    """Draw the first of the candidates that was measured, or the last of them."""
    measured = [panel for panel in candidates if points_of(records, panel.metric, wording.x_metric)[0]]
    panel = measured[0] if measured else candidates[-1]
    decorate(axes, panel.unit, ticks=4)
    axes.set_title(panel.title, loc="left", fontsize=9, color=INK)
    draw_series(axes, *points_of(records, panel.metric, wording.x_metric), SMALL)
    axes.set_ylim(panel.low, panel.high)


def draw_series(axes: Axes, x: Sequence[float], values: Sequence[float], color: str, label: str = "") -> None:
    """Draw a metric: a thin line through every value, a thick one for their running mean."""
    if not x:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=MUTED, fontsize=9)
        return
    axes.plot(*thinned(x, values), color=color, linewidth=0.9, alpha=0.35, zorder=2)
    every = -(-len(x) // DRAWN_POINTS)
    middle = smooth(values)[::every]
    axes.plot(x[::every], middle, color=color, linewidth=2.2, solid_capstyle="round", zorder=3, label=label or None)


def thinned(x: Sequence[float], values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The points of a thin line: all, or of many the lowest and the highest of equal stretches, in their order."""
    if len(x) <= DRAWN_POINTS:
        return x, values
    data = np.asarray(values, dtype=np.float64)
    edges = np.linspace(0, len(data), DRAWN_POINTS // 2 + 1).astype(int)
    pairs = pairwise(edges)
    kept = sorted({a + at for a, b in pairs for at in (int(data[a:b].argmin()), int(data[a:b].argmax()))})
    return [x[at] for at in kept], [values[at] for at in kept]


def smooth(values: Sequence[float], fraction: float = 0.06) -> list[float]:
    """A centred running mean over `fraction` of the values to each side, and over fewer at the ends."""
    data = np.asarray(values, dtype=np.float64)
    reach = max(1, round(fraction * len(data)))
    at = np.arange(len(data))
    first, last = np.maximum(0, at - reach), np.minimum(len(data), at + reach + 1)
    sums = np.concatenate(([0.0], np.cumsum(data)))
    means: list[float] = ((sums[last] - sums[first]) / (last - first)).tolist()
    return means


def decorate(axes: Axes, unit: str, ticks: int = 8) -> None:
    """Format the axes: no frame, a light grid, a unit."""
    axes.set_ylabel(unit, color=MUTED, fontsize=9)
    _bare(axes)
    axes.spines["bottom"].set_color(GRID)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=ticks, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


ITERATIONS_PICTURE = "iterations.png"


def _bare(axes: Axes) -> None:
    """Axes without a frame, with a light grid."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


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


if TYPE_CHECKING:  # covey.core imports torch
    from covey.core.calibration import Reliability


def draw_reliability(path: Path, found: Reliability, title: str) -> None:
    """Draw the observed frequency over the predicted probability, and below it the number of items in each bin.

    Raises:
        MachineError: if the file cannot be written.
    """
    counts = found.count_K.tolist()
    bins = len(counts)
    filled = [number for number in range(bins) if counts[number]]
    figure = Figure(figsize=(5.6, 6.2), dpi=160, facecolor="white", layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    upper.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (5, 4)), label="perfect calibration")
    upper.bar(
        [(number + 0.5) / bins for number in filled],
        [float(found.observed_K[number]) for number in filled],
        width=0.94 / bins,
        color=TRAINING,
        alpha=0.35,
        label="observed frequency",
    )
    predicted, observed = (
        [float(values[number]) for number in filled] for values in (found.predicted_K, found.observed_K)
    )
    upper.plot(predicted, observed, "o", color=EVALUATION, markersize=5, label="mean prediction of a bin")
    upper.set_xlim(0, 1)
    upper.set_ylim(0, 1)
    upper.set_ylabel("observed frequency", color=MUTED, fontsize=9)
    upper.set_title(f"{title}\nexpected calibration error {found.error:.3f}", loc="left", fontsize=11, color=INK)
    upper.legend(loc="upper left", frameon=False, fontsize=8, labelcolor=INK)
    lower.bar([(number + 0.5) / bins for number in range(bins)], counts, width=0.94 / bins, color=MUTED)
    lower.set_ylabel("items", color=MUTED, fontsize=9)
    lower.set_xlabel("predicted probability", color=MUTED, fontsize=9)
    _bare(upper)
    _bare(lower)
    with faults_of(path):
        figure.savefig(path)
