"""Pictures of a comparison: learning curves by cost, other metrics, and every seed's final score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure  # without pyplot, which would open windows and keep figures
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullFormatter

from covey.comparison.estimates import Band, SeedRun, interquartile_mean_estimate, learning_curve, metric_curve
from covey.comparison.report import Comparison, find_thresholds
from covey.config.fields import plural
from covey.tracking.wording import SECONDS
from covey.tracking.wording import Panel as MetricPanel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
# Okabe and Ito's colours, safe for colour-blind readers, without yellow and black; line styles differ as well.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = ("o", "D", "s", "^", "v", "P")
LEGEND_CHARACTERS = 150  # characters in a row of the legend
METRIC_COLUMNS = 3  # panels in a row of the picture of metrics
LOGARITHMIC = 20  # an axis is logarithmic if it is this many times longer than the cost of the quickest recipe


def draw_learning_curves(comparison: Comparison, path: Path) -> Path:
    """Draw the training score by episodes, environment steps and seconds, side by side; returns the picture's path.

    Thin: each seed, unsmoothed. Thick: the smoothed interquartile mean over seeds with its 95 % band. A marker on the
    line of the threshold is the median cost at which seeds reached it.
    """
    axes_names = comparison.wording.axes
    what = f"{comparison.wording.kind.name} by cost"
    figure = _canvas(comparison, 5.7, what, threshold=comparison.threshold is not None)
    panels = figure.subplots(1, len(axes_names), sharey=True)
    for panel, axis in zip(panels, axes_names, strict=True):
        _draw_panel(panel, comparison, axis)
    panels[0].set_ylabel(f"{comparison.wording.kind.name} while training, sampled actions", color=MUTED, fontsize=10)
    panels[0].yaxis.set_major_formatter(_score_ticks(comparison))
    seen = np.concatenate(
        [run.returns_S[~np.isnan(run.returns_S)] for runs in comparison.runs.values() for run in runs]
    )
    if len(seen):  # low outliers are cut off, so that they do not compress the other values
        goal = -np.inf if comparison.threshold is None else comparison.threshold
        low, high = np.quantile(seen, 0.01), max(seen.max(), goal)
        panels[0].set_ylim(low - 0.04 * (high - low or 1), high + 0.04 * (high - low or 1))
    figure.savefig(path)
    return path


def _draw_panel(panel: Axes, comparison: Comparison, axis: str) -> None:
    _decorate(panel)
    panel.set_xlabel(axis, color=INK, fontsize=10)
    ends = []
    for number, runs in enumerate(comparison.runs.values()):
        color, style = _look(number)
        faint = _faintness(runs)
        for run in runs:
            known = ~np.isnan(run.returns_S)
            panel.plot(run.spent[axis][known], run.returns_S[known], color=color, alpha=faint, linewidth=0.7, zorder=2)
        band = learning_curve(runs, axis)
        if band is None:
            continue
        ends.append(band.spent_P[-1])
        _draw_band(panel, band, color, style, 2.4)
    reached = _draw_threshold(panel, comparison, axis)
    if ends and max(ends) > LOGARITHMIC * min([*ends, *reached]):
        spent = np.concatenate([run.spent[axis] for runs in comparison.runs.values() for run in runs])
        panel.set_xscale("log")
        panel.set_xlabel(f"{axis} (logarithmic)", color=INK, fontsize=10)
        panel.set_xlim(spent[spent > 0].min(), max(ends) * 1.1)  # the first steps may have no ended episode
    elif ends:
        panel.set_xlim(0, max(ends) * 1.02)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}") if axis == SECONDS else EngFormatter(sep=""))


def draw_metrics(comparison: Comparison, path: Path) -> Path:
    """Draw the metrics of the small panels of a run's picture, over seeds; returns the picture's path.

    Thin: each seed. Thick: the smoothed interquartile mean over seeds with its 95 % band.
    """
    rows = -(-len(comparison.wording.panels) // METRIC_COLUMNS)
    figure = _canvas(comparison, 3.1 * rows + 0.95, "metrics of training", threshold=False)
    places = list(figure.subplots(rows, METRIC_COLUMNS, squeeze=False).flat)
    for panel, candidates in zip(places, comparison.wording.panels, strict=False):
        _draw_metric(panel, comparison, _measured(comparison, candidates))
    for panel in places[len(comparison.wording.panels) :]:
        panel.set_visible(False)
    figure.savefig(path)
    return path


def _measured(comparison: Comparison, candidates: Sequence[MetricPanel]) -> MetricPanel:
    """The first candidate that every recipe measured, or that any did, or the last."""

    def seeds(panel: MetricPanel, runs: Sequence[SeedRun]) -> bool:
        return any(panel.metric in run.drawn and not np.isnan(run.drawn[panel.metric]).all() for run in runs)

    groups = comparison.runs.values()
    by_all = [panel for panel in candidates if all(seeds(panel, runs) for runs in groups)]
    by_any = [panel for panel in candidates if any(seeds(panel, runs) for runs in groups)]
    return (by_all or by_any or list(candidates)[-1:])[0]


def _draw_metric(panel: Axes, comparison: Comparison, shown: MetricPanel) -> None:
    """Draw one metric by training steps, in control by environment steps."""
    axis = comparison.wording.axes[0 if comparison.wording.x_metric == "step" else 1]
    _decorate(panel)
    panel.set_title(shown.title, loc="left", fontsize=11, color=INK)
    panel.set_ylabel(shown.unit, color=MUTED, fontsize=9)
    panel.set_xlabel(axis, color=MUTED, fontsize=9)
    known = False
    for number, runs in enumerate(comparison.runs.values()):
        color, style = _look(number)
        for run in runs:
            if shown.metric in run.drawn:
                panel.plot(run.spent[axis], run.drawn[shown.metric], color=color, alpha=_faintness(runs),
                           linewidth=0.7, zorder=2)  # fmt: skip
        band = metric_curve(runs, shown.metric, axis)
        if band is None:
            continue
        known = True
        _draw_band(panel, band, color, style, 2.2)
    if not known:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color=MUTED, fontsize=9)
    panel.set_ylim(shown.low, shown.high)
    panel.set_xlim(left=0)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_band(panel: Axes, band: Band, color: str, style: Any, width: float) -> None:
    panel.fill_between(band.spent_P, band.low_P, band.high_P, color=color, alpha=0.2, linewidth=0, zorder=3)
    panel.plot(band.spent_P, band.middle_P, color=color, linestyle=style, linewidth=width, zorder=5)


def _faintness(runs: Sequence[SeedRun]) -> float:
    """Opacity of a seed's line: fainter with many seeds and steps, which overlap, so that the means remain visible."""
    return max(0.025, 0.5 / len(runs) ** 0.5 * min(1.0, 100 / len(runs[0].returns_S)))


def _draw_threshold(panel: Axes, comparison: Comparison, axis: str) -> list[float]:
    """Draw the dashed line and on it each recipe's median cost to reach it; returns these costs."""
    reached: list[float] = []
    if comparison.threshold is None:
        return reached
    panel.axhline(comparison.threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=4)
    for number, found in enumerate(find_thresholds(comparison).values()):
        middle = float(np.median([one.spent[axis] for one in found]))
        if np.isfinite(middle):
            reached.append(middle)
            panel.plot(middle, comparison.threshold, MARKERS[number % len(MARKERS)], color=_look(number)[0],
                       markersize=9, markeredgecolor="white", markeredgewidth=1.3, zorder=7, clip_on=False)  # fmt: skip
    return reached


def draw_final_scores(comparison: Comparison, path: Path) -> Path:
    """Draw every seed's final score, and the interquartile mean with its 95 % interval; returns the picture's path."""
    runs, kind = comparison.runs, comparison.wording.kind
    figure = Figure(figsize=(9, 1.9 + 0.85 * len(runs)), dpi=150, facecolor="white", layout="constrained")
    panel = figure.subplots()
    _decorate(panel, grid="x")
    for number, seeds in enumerate(runs.values()):
        color, _ = _look(number)
        finals = np.array([run.final for run in seeds])
        middle = interquartile_mean_estimate(finals)
        heights = number + 0.2 + 0.24 * _spread(len(finals))
        panel.plot(finals, heights, "o", color=color, alpha=0.6, markersize=6, markeredgewidth=0, zorder=3)
        panel.plot([middle.low, middle.high], [number - 0.2] * 2, color=color, linewidth=3,
                   solid_capstyle="butt", zorder=4)  # fmt: skip
        panel.plot(middle.value, number - 0.2, "D", color=color, markersize=9, markeredgecolor="white", zorder=5)
        panel.annotate(kind.write(middle.value), (middle.value, number - 0.2), xytext=(0, 9), ha="center",
                       textcoords="offset points", fontsize=9.5, fontweight="bold", color=color)  # fmt: skip
    if comparison.threshold is not None:
        panel.axvline(comparison.threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    panel.set_yticks(range(len(runs)), list(runs), color=INK, fontsize=10)
    panel.set_ylim(len(runs) - 0.4, -0.6)
    panel.margins(x=0.06)
    count = next(iter(runs.values()))[0].final_count
    what = comparison.wording.count_measured(count)
    panel.set_xlabel(f"final {comparison.wording.kind.name}, mean of {what}", color=INK, fontsize=10)
    panel.xaxis.set_major_formatter(_score_ticks(comparison))
    panel.set_title(f"{comparison.subject}: final score of each seed", loc="left", fontsize=13, fontweight="bold",
                    color=INK, pad=22)  # fmt: skip
    panel.text(0, 1.03, "dots: seeds; diamond and bar: interquartile mean and its 95 % interval",
               transform=panel.transAxes, color=MUTED, fontsize=9.5, va="bottom")  # fmt: skip
    figure.savefig(path)
    return path


def _spread(count: int) -> np.ndarray:
    """Vertical offsets of dots that avoid overlap, the same in every picture."""
    return (np.arange(count) * 0.618034 % 1) - 0.5


def _score_ticks(comparison: Comparison) -> FuncFormatter:
    return FuncFormatter(lambda value, _: comparison.wording.kind.write_tick(value))


def _canvas(comparison: Comparison, height: float, what: str, *, threshold: bool) -> Figure:
    """A figure with title, note and legend above its panels, which take `height` inches."""
    columns = max(1, min(len(comparison.runs), LEGEND_CHARACTERS // (8 + max(map(len, comparison.runs)))))
    rows = -(-len(comparison.runs) // columns)
    height += 0.25 * rows
    figure = Figure(figsize=(14, height), dpi=150, facecolor="white")
    head = 0.72 + 0.27 * rows  # inches for title, note and legend
    rect = (0.008, 0.01, 0.984, 0.99 - head / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, wspace=0.04, hspace=0.06))
    counts = sorted({len(runs) for runs in comparison.runs.values()})
    note = (
        f"{' or '.join([*map(str, counts[:-1]), plural(counts[-1], 'seed')])} each. Thin: every seed, unsmoothed. "
        "Thick: smoothed interquartile mean; band: its 95 % bootstrap interval over seeds."
    )
    if threshold:
        note += f" Marker: median seed reaches {comparison.threshold:g}."
    inch = 1 / figure.get_figheight()
    figure.text(
        0.012, 1 - 0.14 * inch, f"{comparison.subject}: {what}", fontsize=15, fontweight="bold", color=INK, va="top"
    )
    figure.text(0.012, 1 - 0.46 * inch, note, fontsize=10, color=MUTED, va="top")
    handles = []
    for number, label in enumerate(comparison.runs):
        color, style = _look(number)
        marker = MARKERS[number % len(MARKERS)] if threshold else ""
        handles.append(Line2D([], [], color=color, linestyle=style, linewidth=2.4, marker=marker, markersize=7,
                              markeredgecolor="white", label=label))  # fmt: skip
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.008, 1 - 0.66 * inch), ncols=columns,
                  frameon=False, fontsize=10.5, labelcolor=INK, handlelength=3, borderpad=0.2)  # fmt: skip
    return figure


def _look(number: int) -> tuple[str, Any]:
    """Colour and line style of the recipe with this number."""
    return COLORS[number % len(COLORS)], STYLES[number % len(STYLES)]


def _decorate(axes: Axes, grid: str = "y") -> None:
    """Format the axes: no frame, a light grid."""
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
