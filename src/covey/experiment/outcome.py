"""What a run leaves at its end, or where it was stopped: summary and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.config.recipe import config_to_dict
from covey.experiment.build import Evaluation, Experiment, ExperimentBuilder
from covey.experiment.resuming import Origin
from covey.runtime.device import peak_memory_bytes
from covey.tracking.diagnosis import brief, diagnose
from covey.tracking.run_folder import write_folders
from covey.tracking.run_store import RunStore, read_metrics
from covey.train.state import Progress


def summarise(
    builder: ExperimentBuilder,
    store: RunStore,
    progress: Progress,
    origin: Origin,
    after: Sequence[Evaluation] = (),
) -> dict[str, Any]:
    """The summary of a run; without `after`, that of a run so far, whose evaluations have no "after"."""
    steps = read_metrics(store.run_dir)
    before: list[Evaluation] = origin["before"]
    results = builder.results(before, after)
    sampled = {"decisions_sampled": progress.decisions} if builder.has_rollouts else {}
    best = {"best": {"step": progress.best_step, "score": progress.best_score}} if progress.best_step else {}
    return {
        "domain": builder.name,
        "score_kind": builder.score_kind,
        "run_dir": str(store.run_dir),
        "recipe": origin["recipe"],
        "algorithm": builder.algorithm_name,
        "seed": builder.config.seed,
        "steps": progress.step,
        "seconds": sum(step.get("time/step", 0.0) for step in steps)
        + sum(result["seconds"] for result in (*before, *after)),
        **sampled,
        "peak_memory_bytes": max([peak_memory_bytes(), *(int(step.get("memory/peak_bytes", 0)) for step in steps)]),
        "machine": origin["environment"],
        **results,
        "findings": brief(diagnose(steps, config_to_dict(builder.config), results["evaluations"])),
        **best,
    }


def leave_stopped(
    builder: ExperimentBuilder, experiment: Experiment, store: RunStore, progress: Progress, origin: Origin
) -> None:
    """Write what a run leaves that was stopped after a step: stopped.json, on request its weights, and its picture.

    Every rank calls it. A resumed run removes or replaces these files.
    """
    saves = [experiment.collect()] if builder.saves_if_stopped else []
    if experiment.parts.team.rank or store.finished():
        return
    state = {"state": "stopped", "step": progress.step}
    store.write_stopped(state | summarise(builder, store, progress, origin) | experiment.facts())
    for save in saves:
        write_folders(store.run_dir, save)
    builder.draw(store)
