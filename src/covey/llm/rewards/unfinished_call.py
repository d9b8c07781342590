"""A file in the run folder during reward calls: if a call ends the run's process, the resumed run reports it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covey.data import Grader, Group

CALL_FILE = "unfinished_call.json"


@dataclass(frozen=True)
class NotedGrader:
    """A `covey.data.Grader` whose `file` exists during a call, and so remains if the process ends in one."""

    grader: Grader
    names: Sequence[str]  # of the rewards
    file: Path

    def grade(self, groups: list[Group]) -> list[Group]:
        """As `RewardGrader.grade`."""
        self.file.write_text(json.dumps(self.names))
        try:
            return self.grader.grade(groups)
        finally:
            self.file.unlink(missing_ok=True)

    def take_note(self) -> str:
        """Return one line about an unfinished call and delete the file; empty if there was none."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            names = json.loads(self.file.read_text())
            self.file.unlink()
            return (
                f"the process of this run ended while its rewards were computed ({', '.join(map(str, names))}): unless "
                "it was stopped from outside, a reward function ended it, by os._exit or a signal, and may do so again"
            )
        return ""
