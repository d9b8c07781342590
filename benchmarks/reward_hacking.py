"""Draw iterative runs with a frozen reward model beside runs with one that is retrained (docs/iterative.md).

    .venv/bin/python benchmarks/reward_hacking.py --frozen runs/frozen-* --retrained runs/retrained-*

The runs are made by the commands of docs/iterative.md. A thin line is one seed, a thick one the mean of the seeds.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from covey.tracking.curve import EVALUATION, MUTED, TRAINING, decorate, points_of, read_iterations
from covey.tracking.run_store import read_metrics

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "iterative.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frozen", type=Path, nargs="+", required=True, help="run folders, one for each seed")
    parser.add_argument("--retrained", type=Path, nargs="+", required=True, help="run folders, one for each seed")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    figure = Figure(figsize=(9, 8), dpi=130, facecolor="white", layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    for runs, label, color in (
        (arguments.frozen, "frozen reward model", EVALUATION),
        (arguments.retrained, "retrained reward model", TRAINING),
    ):
        steps, iterations = [read_metrics(run) for run in runs], [read_iterations(run) for run in runs]
        rewards = ("score/mean", f"reward/{iterations[0][0]['reward']}")
        for axes, metric in zip(panels, rewards, strict=False):
            draw(axes, [values_of(records, metric) for records in steps], color, label)
        quality = [[{"step": record["step"], **record["before"]} for record in records] for records in iterations]
        draw(panels[2], [values_of(records, "rank_agreement") for records in quality], color, label, marker="o")
        print(f"{label}: seed by seed, means of the last five steps")
        for run, records in zip(runs, steps, strict=True):
            true, proxy = (mean(record[metric] for record in records[-5:]) for metric in rewards)
            print(f"  {run}: true reward {true:.3f}, proxy reward {proxy:.2f}")
    titles = ("true reward (verifier)", "proxy reward (reward model of the step)", "rank agreement before retraining")
    for axes, title in zip(panels, titles, strict=True):
        decorate(axes, "mean of a step" if axes is not panels[2] else "right above wrong")
        axes.set_title(title, loc="left", fontsize=11)
    panels[2].set_xlabel("training step", color=MUTED, fontsize=9)
    panels[0].legend(frameon=False, fontsize=9, loc="center left")
    figure.savefig(arguments.picture)
    print(f"written: {arguments.picture}")


def values_of(records: Sequence[dict[str, Any]], metric: str) -> dict[float, float]:
    """The values of one metric by step, without the steps that lack it."""
    return dict(zip(*points_of(records, metric, "step"), strict=True))


def draw(axes: Axes, seeds: Sequence[dict[float, float]], color: str, label: str, *, marker: str = "") -> None:
    """Draw each seed thin, and their mean where any seed has a value thick."""
    for values in seeds:
        axes.plot(list(values), list(values.values()), color=color, marker=marker, linewidth=0.7, alpha=0.4)
    steps = sorted({step for values in seeds for step in values})
    means = [mean(values[step] for values in seeds if step in values) for step in steps]
    axes.plot(steps, means, color=color, linewidth=2.2, label=label)


if __name__ == "__main__":
    main()
