"""The observer of the loop that hands the steps of a run to its trackers, each in a thread of its own."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config import ControlConfig, RunConfig
from covey.config.fields import printable
from covey.config.files import faults_of, read_below
from covey.config.recipe import config_to_dict
from covey.config.sft import RewardModelTraining
from covey.tracking.console import last_turn
from covey.tracking.run_folder import TRACKERS_FOLDER
from covey.tracking.run_store import RunStore, read_metrics, rollout_record
from covey.tracking.trackers.adapters import ADAPTERS, COLUMNS, Position, Row, TrackedRun, Tracker

if TYPE_CHECKING:  # covey.data imports torch, and a mistake in a recipe is reported before that
    from covey.data import StepRecord

CLOSING_SECONDS = 60.0  # wait for the trackers at the end of a run
WAITING_STEPS = 10_000  # most steps that wait for a tracker; one that is further behind hangs
TABLES = 50  # most steps of a run with a table of rollouts
GROUPS = 4  # groups in a table, of each the best and the worst rollout
CHARACTERS = 2_000  # of a prompt or a completion


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
        self._end(None)

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
            thread.put(_from_folder(first, self._store, step, self._steps))

    def record(self, record: StepRecord) -> None:
        """Hand a finished step to the trackers, without waiting for them."""
        if not self._threads:
            return
        rows = rows_of(record) if has_table(record.step, self._steps) else []
        for thread in self._threads:
            thread.put([Step(record.step, _finite(record.metrics), lambda: rows)])
        self._report()

    def finish(self, summary: Mapping[str, Any], after: Mapping[str, float]) -> None:
        """Log the metrics after training and the summary, and wait for the trackers."""
        recorded = read_metrics(self._store.run_dir)[-1:] if self._threads else []
        measured = any(after.keys() <= record.keys() for record in recorded)  # among the metrics of the last step
        self._end(summary, None if measured else Step(summary["steps"], _finite(after)))

    def _end(self, summary: Mapping[str, Any] | None, result: Step | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.put((summary, result))
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
    return Trackers({name: ADAPTERS[name]() for name in config.trackers}, run, store, config, note)


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


@dataclass(frozen=True)
class Step:
    """What a tracker logs of one step. `rollouts` is called in the thread."""

    number: int
    metrics: Mapping[str, float]
    rollouts: Callable[[], Sequence[Row]] = tuple


Ending = tuple[Mapping[str, Any] | None, Step | None]  # the summary if the run is whole; the evaluation after training


class TrackerThread:
    """One tracker in its thread. The file `<name>.json` in the run folder keeps its position.

    A step waits in a queue until the tracker takes it. After an exception, or if the tracker falls too far behind, it
    is given no more: `fault` has the reason.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun) -> None:
        self.name, self.fault = name, ""
        self._tracker, self._run = tracker, run
        self._path = run.folder / f"{name}.json"
        self._queue: queue.Queue[Iterable[Step] | Ending] = queue.Queue(WAITING_STEPS)
        self._thread = threading.Thread(target=self._work, name=f"covey-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Iterable[Step] | Ending) -> None:
        """Log steps or end the run after those that wait, without waiting. Steps that the tracker has are left out."""
        if self.fault:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.fault = f"it is {WAITING_STEPS} steps behind"

    def join(self, seconds: float) -> None:
        """Wait for the end, at most this long."""
        self._thread.join(seconds)
        if self._thread.is_alive() and not self.fault:
            self.fault = f"it has not taken all steps within {seconds:.0f} s"

    def _work(self) -> None:
        try:
            position = self._tracker.start(self._run, read_position(self._path))
            self._keep(position)
            while not isinstance(item := self._queue.get(), tuple):
                for step in item:
                    if self.fault:
                        return
                    position = self._log(step, position)
            summary, result = item
            if result is not None and not position.evaluated:
                self._tracker.log(result.number, result.metrics, result.rollouts())
                position = replace(position, evaluated=True)
                self._keep(position)
            self._tracker.finish(summary)
        except BaseException as error:  # SystemExit too, which some packages raise
            self.fault = self.fault or " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def _log(self, step: Step, position: Position) -> Position:
        if step.number <= position.step:
            return position
        self._tracker.log(step.number, step.metrics, step.rollouts())
        position = replace(position, step=step.number)
        self._keep(position)
        return position

    def _keep(self, position: Position) -> None:
        """Replace the file, without fsync: a power cut may cost the position, and then the tracker begins a new run."""
        temporary = self._path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        temporary.write_text(json.dumps(asdict(position)), encoding="utf-8")
        temporary.replace(self._path)


def read_position(path: Path) -> Position | None:
    """The position in a file; None if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        position = Position(**json.loads(read_below(path.parent, path.name)))
        if isinstance(position.id, str) and type(position.step) is int and type(position.evaluated) is bool:
            return position
    return None


def has_table(step: int, steps: int) -> bool:
    """True for the first step, the last one, and about TABLES steps at equal distances."""
    return step in (1, steps) or step % max(1, -(-steps // TABLES)) == 0


def rows_of(record: StepRecord) -> list[Row]:
    """The table of a step's rollouts."""
    return select_rows(rollout_record(record.step, *rollout) for rollout in record.rollouts())


def select_rows(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The best and the worst graded rollout of the groups whose rewards differ most, from lines of a rollouts file."""
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["reward"] is not None:
            groups[record["group"]].append(record)
    ends = [(min(group, key=_reward), max(group, key=_reward)) for group in groups.values()]
    ends.sort(key=lambda pair: _reward(pair[0]) - _reward(pair[1]))  # stable, so groups alike keep their order
    return [
        _row(record) for worst, best in ends[:GROUPS] for record in ((best, worst) if best is not worst else (best,))
    ]


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["reward"])


def _row(record: Mapping[str, Any]) -> Row:
    shown = {"prompt": _clip(last_turn(record["prompt"])), "completion": _clip(record["text"])}
    return tuple({**record, **shown}[column] for column in COLUMNS)


def _clip(text: str) -> str:
    text = printable(text)
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 2] + " …"
