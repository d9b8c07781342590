"""The tracker TensorBoard: event files in `trackers/tensorboard` of the run folder. Nothing leaves the machine."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from covey.tracking.trackers.rows import COLUMNS, Row
from covey.tracking.trackers.tracker import NEW, Position, TrackedRun, flat

FOLDER = "tensorboard"
_ESCAPED = str.maketrans(
    {character: f"&#{ord(character)};" for character in string.punctuation} | {"\n": " ⏎ ", "\r": " ", "\t": " "}
)


class TensorBoardTracker:
    """Writes event files; implements `Tracker`. Every step is flushed, so a killed process loses none."""

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Open an event file. Readers discard the events of earlier files after the position (purge_step)."""
        from torch.utils.tensorboard import SummaryWriter

        position = position or Position(FOLDER)
        self._writer: Any = SummaryWriter(str(run.folder / FOLDER), purge_step=position.step + 1)  # type: ignore[no-untyped-call]
        if position.step == NEW:
            settings = [(name, json.dumps(value)) for name, value in flat(run.config).items()]
            self._writer.add_text("config", as_markdown(("field", "value"), settings), 0)
        return position

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Write scalars, and the rollouts as a table of text."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if rollouts:
            self._writer.add_text("rollouts", as_markdown(COLUMNS, rollouts), step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Write the summary as text, and close the file."""
        if summary is not None:
            pairs = [(name, json.dumps(value)) for name, value in flat(summary).items()]
            self._writer.add_text("summary", as_markdown(("key", "value"), pairs), summary["steps"])
        self._writer.close()


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown. All punctuation of its cells is escaped, so a completion is shown as text, not as markup."""
    lines = [" | ".join(_cell(cell) for cell in row) for row in (columns, *rows)]
    lines.insert(1, " | ".join("---" for _ in columns))
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).translate(_ESCAPED)
