"""What a tracker is given, and the protocol of its adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from covey.tracking.trackers.rows import Row

NEW = -1  # the last step of a tracker's run that has none yet; step 0 is the evaluation before training


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker describes it."""

    folder: Path  # for what the tracker writes into the run folder
    name: str  # of the run folder
    recipe: str
    config: Mapping[str, Any]  # nested tables, as in config.toml


@dataclass(frozen=True)
class Position:
    """The place of a tracker in a run."""

    id: str  # by which the tracker finds its own run again
    step: int = NEW  # the last step that it has
    evaluated: bool = False  # True: the evaluation after training was logged


class Tracker(Protocol):
    """Adapter of an experiment tracker. All calls come from one thread; after an exception there are no more."""

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Begin a run of the tracker (None), or continue at a position; its step may be older than the tracker's last.

        Returns:
            The position: later steps are logged next.
        """

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Log finite metrics, named as in `metrics.jsonl`, and a table of rollouts, which is empty at most steps."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Log the content of `summary.json`, and end. None: the run has stopped before its end, and may be resumed."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names: {"loss.clip_low": 0.2}. Tables of a list are numbered from 1."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        tables = isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value)
        inner = {str(number): item for number, item in enumerate(value, start=1)} if tables else value
        if isinstance(inner, Mapping):
            values |= flat(inner, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values
