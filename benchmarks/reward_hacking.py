"""Draw iterative runs with a frozen reward model beside runs with one that is retrained (docs/iterative.md).

    .venv/bin/python benchmarks/reward_hacking.py --frozen runs/frozen-* --retrained runs/retrained-*

The runs are made by the commands of docs/iterative.md. A thin line is one seed, a thick one the mean of the seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from covey.tracking.curve import EVALUATION, MUTED, TRAINING, decorate
from covey.tracking.run_store import ITERATIONS_FILE, read_metrics

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
        steps = [{record["step"]: record for record in read_metrics(run)} for run in runs]
        ends = [iterations_of(run) for run in runs]
        name = next(iter(ends[0].values()))["reward"]
        draw(panels[0], [values_of(run, "score/mean") for run in steps], color, label)
        draw(panels[1], [values_of(run, f"reward/{name}") for run in steps], color, label)
        quality = [{step: record["before"] for step, record in run.items()} for run in ends]
        draw(panels[2], [values_of(run, "rank_agreement") for run in quality], color, label, marker="o")
        print(f"{label}: seed by seed, means of the last five steps")
        for run, records in zip(runs, steps, strict=True):
            last = [records[step] for step in sorted(records)[-5:]]
            true, proxy = (mean(record[key] for record in last) for key in ("score/mean", f"reward/{name}"))
            print(f"  {run}: true reward {true:.3f}, proxy reward {proxy:.2f}")
    titles = ("true reward (verifier)", "proxy reward (reward model of the step)", "rank agreement before retraining")
    for axes, title in zip(panels, titles, strict=True):
        decorate(axes, "mean of a step" if axes is not panels[2] else "right above wrong")
        axes.set_title(title, loc="left", fontsize=11)
    panels[2].set_xlabel("training step", color=MUTED, fontsize=9)
    panels[0].legend(frameon=False, fontsize=9, loc="center left")
    figure.savefig(arguments.picture)
    print(f"written: {arguments.picture}")


def iterations_of(run: Path) -> dict[int, dict[str, Any]]:
    """The records of a run's iterations by their last step."""
    records = [json.loads(line) for line in (run / ITERATIONS_FILE).read_text(encoding="utf-8").splitlines()]
    return {record["step"]: record for record in records}


def values_of(records: dict[int, dict[str, Any]], key: str) -> dict[int, float]:
    """The values of one metric by step, without the steps that lack it."""
    return {step: record[key] for step, record in records.items() if record.get(key) is not None}


def draw(axes: Axes, seeds: Sequence[dict[int, float]], color: str, label: str, *, marker: str = "") -> None:
    """Draw each seed thin, and their mean where any seed has a value thick."""
    for values in seeds:
        axes.plot(list(values), list(values.values()), color=color, marker=marker, linewidth=0.7, alpha=0.4)
    steps = sorted({step for values in seeds for step in values})
    means = [mean(values[step] for values in seeds if step in values) for step in steps]
    axes.plot(steps, means, color=color, linewidth=2.2, label=label)


if __name__ == "__main__":
    main()
