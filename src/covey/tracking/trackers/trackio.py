"""The tracker trackio: a local SQLite database, or the server or Space that its environment variables name."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.tracking.trackers.rows import COLUMNS, Row
from covey.tracking.trackers.tracker import Position, TrackedRun, flat

PROJECT = "covey"  # unless TRACKIO_PROJECT names another


class TrackioTracker:
    """Logs to a run of trackio; implements `Tracker`. trackio's own measurements of the machine are off."""

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Begin a run, or continue the one with the position's name."""
        import trackio

        name = position.id if position else f"{run.name}-{uuid.uuid4().hex[:6]}"  # trackio finds a run by its name
        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            group=run.recipe,
            config=dict(run.config),
            resume="allow" if position else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if position is None:
            return Position(name)
        last = self._run._next_step - 1  # trackio's database, which it writes twice a second, may lack the last steps
        return replace(position, step=last)

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Log metrics, and the rollouts as a table."""
        table = {"rollouts": self._trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rollouts])}
        self._run.log({**metrics, **(table if rollouts else {})}, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Log the summary as a table of text, and write what waits."""
        if summary is not None:
            rows = [[name, str(value)] for name, value in flat(summary).items()]
            self._run.log({"summary": self._trackio.Table(columns=["key", "value"], data=rows)}, step=summary["steps"])
        self._run.finish()
