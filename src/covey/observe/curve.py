"""A run as one picture: `curve.png`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure  # used without pyplot: nothing opens a window, nothing is kept
from matplotlib.ticker import MaxNLocator, PercentFormatter

from covey.observe.run_store import CURVE_FILE, SUMMARY_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
TRAINING, HELD_OUT, REWARD = "#2563eb", "#c2410c", "#0f766e"
SMALL_PANELS = (
    ("kl", "KL to the reference", "nats per token"),
    ("length/mean", "Completion length", "tokens"),
    ("groups/dead_share", "Groups that teach nothing", "share"),
)


def draw_curve(run_dir: str | Path) -> Path:
    """Draw accuracy by step, held-out accuracy before and after, and small panels below; returns the picture's path.

    Reads `metrics.jsonl`, and `summary.json` where there is one. A run without a score shows its reward instead.

    Raises:
        ConfigError: if there is no metrics file.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir)
    summary_path = run_dir / SUMMARY_FILE
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else {}

    figure = Figure(figsize=(9, 6.4), dpi=160, facecolor="white", layout="constrained")
    grid = figure.add_gridspec(2, len(SMALL_PANELS), height_ratios=(2.6, 1))
    _draw_main(figure.add_subplot(grid[0, :]), records, summary)
    for column, (name, title, unit) in enumerate(SMALL_PANELS):
        axes = figure.add_subplot(grid[1, column])
        _decorate(axes, unit)
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        _draw_series(axes, records, name, REWARD)
        axes.set_ylim(bottom=0, top=1 if unit == "share" else None)
    path = run_dir / CURVE_FILE
    figure.savefig(path)
    return path


def _draw_main(axes: Axes, records: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The large panel: what training is for."""
    has_scores = any(record.get("score/mean") is not None for record in records)
    name, label = ("score/mean", "accuracy") if has_scores else ("reward/mean", "reward")
    title = f"{summary['recipe']}: {label} while it trains" if "recipe" in summary else f"{label.capitalize()} by step"
    _decorate(axes, label)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=12)
    axes.set_xlabel("training step", color=MUTED, fontsize=9)
    _draw_series(axes, records, name, TRAINING, f"training {label}, sampled (thin: each step)")

    checked = [(r["step"], r["eval/score"]) for r in records if r.get("eval/score") is not None]
    last = max((record["step"] for record in records), default=1)
    evaluations = summary.get("evaluations", [])
    if checked:
        axes.plot(*zip(*checked, strict=True), "o", color=HELD_OUT, markersize=5, zorder=4,
                  label=None if evaluations else "held-out accuracy, greedy")  # fmt: skip
    if evaluations:
        _draw_before_after(axes, evaluations[0], last)
    if has_scores:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    margin = max(last * 0.06, 0.5)
    axes.set_xlim(-margin, last + 1.3 * margin)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)


def _draw_before_after(axes: Axes, evaluation: dict[str, Any], last: int) -> None:
    """The two held-out measurements with their intervals and their values beside them."""
    results = (evaluation["before"], evaluation["after"])
    label = f"held-out accuracy, greedy, {results[1]['count']} problems (95 % interval)"
    for step, result, side in zip((0, last), results, (-1, 1), strict=True):
        share = result["score"]
        axes.plot([step, step], [result["low"], result["high"]], color=HELD_OUT, linewidth=2, zorder=5)
        axes.plot([step] * 2, [result["low"], result["high"]], "_", color=HELD_OUT, markersize=9, zorder=5)
        axes.plot(step, share, "o", color=HELD_OUT, markersize=9, markeredgecolor="white", zorder=6,
                  label=label if side > 0 else None)  # fmt: skip
        axes.annotate(f"{share:.0%}", (step, share), xytext=(9 * side, 0), textcoords="offset points", va="center",
                      ha="left" if side > 0 else "right", fontsize=12, fontweight="bold", color=HELD_OUT)  # fmt: skip


def _draw_series(axes: Axes, records: Sequence[dict[str, Any]], name: str, color: str, label: str = "") -> None:
    """A metric by step: every value thin, their running mean thick."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    if not points:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=MUTED, fontsize=9)
        return
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.35, zorder=2)
    axes.plot(steps, smooth(values), color=color, linewidth=2.2, solid_capstyle="round", zorder=3, label=label or None)


def smooth(values: Sequence[float], share: float = 0.06) -> list[float]:
    """A centred running mean that reaches over `share` of the values to each side, and over fewer at the ends."""
    data = np.asarray(values, dtype=np.float64)
    reach = max(1, round(share * len(data)))
    return [float(data[max(0, i - reach) : i + reach + 1].mean()) for i in range(len(data))]


def _decorate(axes: Axes, unit: str) -> None:
    """Quiet axes: no frame, a light grid."""
    axes.set_ylabel(unit, color=MUTED, fontsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
