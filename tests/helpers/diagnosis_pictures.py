"""Pictures of docs/healthy.md from the recorded runs: PYTHONPATH=tests python -m helpers.diagnosis_pictures."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from covey.tracking.curve import EVALUATION, GRID, INK, MUTED, TRAINING, points_of
from covey.tracking.diagnosis import diagnose
from helpers.diagnosis_records import HEALTHY_FILE, SICK_FILE, RecordedRun, read_recorded

IMAGES = Path(__file__).parents[2] / "docs" / "images"
TITLES = {
    "reward/mean": "reward",
    "score/mean": "score",
    "entropy": "entropy, nats per decision",
    "groups/zero_advantage_fraction": "groups with equal rewards",
    "grad_norm": "gradient norm",
    "length/mean": "completion length, tokens",
    "length/truncated_fraction": "cut completions, fraction",
    "length/truncated_reward": "reward of cut completions",
    "value/explained_variance": "explained variance",
    "loss/value": "loss of the critic",
    "kl": "KL to the reference, nats",
}
PICTURES = {
    "healthy": ("tiny first digit, grpo", ("score/mean", "entropy", "groups/zero_advantage_fraction")),
    "hacking": ("reward hacking", ("reward/mean", "score/mean", "length/mean")),
    "collapse": ("entropy collapse", ("entropy", "score/mean", "groups/zero_advantage_fraction")),
    "truncation": ("truncation", ("length/truncated_fraction", "length/truncated_reward", "score/mean")),
    "critic": ("critic that explains nothing", ("value/explained_variance", "loss/value", "score/mean")),
}


def draw(path: Path, run: RecordedRun, names: tuple[str, ...]) -> None:
    """Three metrics of a run side by side; a dashed line where the check of its name first found something."""
    found = [f.first_step for f in diagnose(run.metrics, run.config, run.evaluations) if f.check == run.name]
    figure = Figure(figsize=(9, 2.6), dpi=130, facecolor="white", layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        steps, values = points_of(run.metrics, name, "step")
        axes.plot(steps, values, color=TRAINING, linewidth=1.6)
        for step in found:
            axes.axvline(step, color=EVALUATION, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_title(TITLES[name], loc="left", fontsize=10, color=INK)
        axes.set_xlabel("step", fontsize=8, color=MUTED)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.tick_params(colors=MUTED, labelsize=8, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    runs = {run.name: run for run in [*read_recorded(HEALTHY_FILE), *read_recorded(SICK_FILE)]}
    for picture, (run_name, metrics) in PICTURES.items():
        draw(IMAGES / f"healthy_{picture}.png", runs[run_name], metrics)
