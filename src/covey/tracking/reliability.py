"""The reliability diagram of a reward model as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure  # without pyplot, which would open windows and keep figures

from covey.config.files import faults_of
from covey.tracking.curve import EVALUATION, GRID, INK, MUTED, TRAINING

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
    for axes in (upper, lower):
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, labelsize=8, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    with faults_of(path):
        figure.savefig(path)
