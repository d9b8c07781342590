"""Calls a tracker from a thread of its own, so that neither its faults nor its speed reach the training."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from covey.config.files import read_below
from covey.tracking.trackers.rows import Row
from covey.tracking.trackers.tracker import Position, TrackedRun, Tracker

WAITING_STEPS = 10_000  # most steps that wait for a tracker; one that is further behind hangs


@dataclass(frozen=True)
class Step:
    """What a tracker logs of one step. `rollouts` is called in the thread."""

    number: int
    metrics: Mapping[str, float]
    rollouts: Callable[[], Sequence[Row]] = tuple


@dataclass(frozen=True)
class Ending:
    """The end of a run. `summary` is None if it stopped before its end."""

    summary: Mapping[str, Any] | None
    result: Step | None = None  # the evaluation after training


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

    def log(self, steps: Iterable[Step]) -> None:
        """Log steps, without waiting. Steps that the tracker already has are left out."""
        self._put(steps)

    def end(self, ending: Ending) -> None:
        """End the tracker's run after the steps that wait, without waiting."""
        self._put(ending)

    def join(self, seconds: float) -> None:
        """Wait for the end, at most this long."""
        self._thread.join(seconds)
        if self._thread.is_alive() and not self.fault:
            self.fault = f"it has not taken all steps within {seconds:.0f} s"

    def _put(self, item: Iterable[Step] | Ending) -> None:
        if self.fault:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.fault = f"it is {WAITING_STEPS} steps behind"

    def _work(self) -> None:
        try:
            position = self._tracker.start(self._run, read_position(self._path))
            self._keep(position)
            while isinstance(item := self._queue.get(), Iterable):
                for step in item:
                    if self.fault:
                        return
                    position = self._log(step, position)
            if item.result is not None and not position.evaluated:
                self._tracker.log(item.result.number, item.result.metrics, item.result.rollouts())
                position = replace(position, evaluated=True)
                self._keep(position)
            self._tracker.finish(item.summary)
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
