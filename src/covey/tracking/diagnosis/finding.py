"""The result of a check, and the definition of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from covey.tracking.diagnosis.history import History
from covey.tracking.diagnosis.settings import Settings

Severity = Literal["warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """A fault of a run that a check has found.

    >>> Finding("truncation", "problem", 20, 60, "97 % of the completions of steps 51 to 60 ended at the limit", ...)
    """

    check: str  # name of the check
    severity: Severity  # "problem": training has next to no effect, or its results are not valid
    first_step: int  # at which the check found it
    last_step: int  # at which it was found last; below the run's last step, it is over
    evidence: str  # one sentence with numbers, without a full stop
    explanation: str
    remedy: str  # fields of the recipe with values to try
    metrics: tuple[str, ...]  # to look at

    @property
    def line(self) -> str:
        """The finding in one line, for a display."""
        return f"{self.severity} at step {self.first_step}: {self.check}: {self.evidence}. {self.remedy}"


@dataclass(frozen=True)
class Seen:
    """The observation of a check at one step."""

    evidence: str
    remedy: str
    severity: Severity = "warning"
    explanation: str = ""  # in place of the check's


@dataclass(frozen=True)
class Check:
    """A named condition over the metrics of a run.

    `find` gets the metrics so far and the settings of the run, and returns None if the condition does not hold or the
    metrics do not suffice.
    """

    name: str
    metrics: tuple[str, ...]  # that it reads; those of the finding
    find: Callable[[History, Settings], Seen | None]
    condition: str  # with its thresholds, for docs/healthy.md
    explanation: str
    source: str = ""  # of the thresholds, for docs/healthy.md
    keeps_first: bool = False  # evidence and remedy are those of the first observation, not of the last


def sentence(words: str) -> str:
    """The words with a capital letter at the beginning and a mark at the end."""
    words = words.strip()
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "?", "!")) else ".")
