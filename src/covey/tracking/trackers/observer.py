"""The observer of the loop that hands a run's steps to its trackers, and the table of trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config import ControlConfig, RunConfig
from covey.config.files import faults_of, read_below
from covey.config.recipe import config_to_dict
from covey.config.sft import RewardModelTraining
from covey.tracking.run_folder import TRACKERS_FOLDER
from covey.tracking.run_store import RunStore, read_metrics
from covey.tracking.trackers.rows import Row, has_table, rows_of, select_rows
from covey.tracking.trackers.thread import Ending, Step, TrackerThread
from covey.tracking.trackers.tracker import TrackedRun, Tracker

if TYPE_CHECKING:  # covey.data imports torch, and a mistake in a recipe is reported before that
    from covey.data import StepRecord

CLOSING_SECONDS = 60.0  # wait for the trackers at the end of a run
ADAPTERS = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "trackio": "TrackioTracker",
    "mlflow": "MLflowTracker",
}


class Trackers:
    """An `Observer` of the loop and a context manager. Without trackers it does nothing.

    A tracker that fails is reported once and left out for the rest of the process; the run goes on.
    """

    def __init__(
        self,
        adapters: Mapping[str, Tracker],
        run: TrackedRun,
        store: RunStore,
        config: RunConfig | ControlConfig | RewardModelTraining,
        note: Callable[[str], None],
    ) -> None:
        self._adapters, self._run, self._store, self._note = adapters, run, store, note
        self._threads: list[TrackerThread] = []
        self._steps = config.steps
        self._reported: set[str] = set()
        self._ended = False

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(Ending(None))

    def begin(self, before: Mapping[str, float], step: int) -> None:
        """Start the trackers: log the metrics before training and, in a resumed run, missing steps up to `step`.

        Raises:
            MachineError: if the folder for them cannot be created.
        """
        if self._adapters:
            with faults_of(self._run.folder):
                self._run.folder.mkdir(exist_ok=True)
        self._threads = [TrackerThread(name, adapter, self._run) for name, adapter in self._adapters.items()]
        first = Step(0, _finite(before))
        for thread in self._threads:
            thread.log(_from_folder(first, self._store, step, self._steps))

    def record(self, record: StepRecord) -> None:
        """Hand a finished step to the trackers, without waiting for them."""
        if not self._threads:
            return
        rows = rows_of(record) if has_table(record.step, self._steps) else []
        for thread in self._threads:
            thread.log([Step(record.step, _finite(record.metrics), lambda: rows)])
        self._report()

    def finish(self, summary: Mapping[str, Any], after: Mapping[str, float]) -> None:
        """Log the metrics after training and the summary, and wait for the trackers."""
        recorded = read_metrics(self._store.run_dir)[-1:] if self._threads else []
        measured = any(after.keys() <= record.keys() for record in recorded)  # among the metrics of the last step
        self._end(Ending(summary, None if measured else Step(summary["steps"], _finite(after))))

    def _end(self, ending: Ending) -> None:
        if self._ended:
            return
        self._ended = True
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.end(ending)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._report()

    def _report(self) -> None:
        for thread in self._threads:
            if thread.fault and thread.name not in self._reported:
                self._reported.add(thread.name)
                self._note(
                    f"warning: the tracker {thread.name} failed and is left out; the run goes on, and its folder has "
                    f"everything ({thread.fault})"
                )


def open_trackers(
    config: RunConfig | ControlConfig | RewardModelTraining, store: RunStore, recipe: str, note: Callable[[str], None]
) -> Trackers:
    """The trackers of a run, which begin with it.

    Raises:
        ConfigError: if one cannot be used on this machine.
    """
    run = TrackedRun(store.run_dir / TRACKERS_FOLDER, store.run_dir.absolute().name, recipe, config_to_dict(config))
    return Trackers({name: find_adapter(name)() for name in config.trackers}, run, store, config, note)


def find_adapter(name: str) -> Callable[[], Tracker]:
    """The class of a tracker's adapter."""
    adapter: Callable[[], Tracker] = getattr(import_module(f"covey.tracking.trackers.{name}"), ADAPTERS[name])
    return adapter


def _from_folder(first: Step, store: RunStore, last: int, steps: int) -> Iterator[Step]:
    """The steps of a run folder up to `last`, after `first`; read in the tracker's thread."""
    yield first
    if not last:
        return
    for record in read_metrics(store.run_dir):
        step = record["step"]
        if step > last:
            return
        metrics = {name: value for name, value in record.items() if name != "step"}
        path = store.rollouts_path(step) if has_table(step, steps) else None
        yield Step(step, _finite(metrics), partial(_rows_of_file, path))


def _rows_of_file(path: Path | None) -> list[Row]:
    """The table of a file of rollouts; empty if it cannot be read."""
    if path is None:
        return []
    try:
        return select_rows(json.loads(line) for line in read_below(path.parent, path.name).splitlines())
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
