"""Runs all checks over the metrics of a run, step by step or afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.tracking.diagnosis import optimization, signal
from covey.tracking.diagnosis.finding import Check, Finding, Seen
from covey.tracking.diagnosis.history import History
from covey.tracking.diagnosis.settings import Settings

CHECKS: tuple[Check, ...] = (*signal.CHECKS, *optimization.CHECKS)
STRIDE = 5  # steps between evaluations of the checks

Metrics = Mapping[str, float | None]


class Diagnosis:
    """The checks of one run, fed step by step. The cost of a step does not grow with the number of steps."""

    def __init__(self, config: Mapping[str, Any], checks: Sequence[Check] = CHECKS) -> None:
        self.settings = Settings(config)
        self.checks = checks
        self.history = History(name for check in checks for name in check.metrics)
        self._found: dict[str, Finding] = {}
        self._checked = 0

    def add(self, step: int, metrics: Metrics) -> list[Finding]:
        """Add a finished step; returns the findings of checks that had none before."""
        self.history.add(step, metrics)
        return self._check() if self.history.steps % STRIDE == 0 else []

    def findings(self) -> list[Finding]:
        """All findings so far, problems first, then in the order of their first step."""
        self._check()
        return sorted(self._found.values(), key=lambda finding: (finding.severity != "problem", finding.first_step))

    def _check(self) -> list[Finding]:
        if self._checked == self.history.steps:
            return []
        self._checked = self.history.steps
        new = []
        for check in self.checks:
            seen = check.find(self.history, self.settings)
            if seen is not None:
                if check.name not in self._found:
                    new.append(check)
                self._found[check.name] = self._finding(check, seen)
        return [self._found[check.name] for check in new]

    def _finding(self, check: Check, seen: Seen) -> Finding:
        earlier = self._found.get(check.name)
        return Finding(
            check.name,
            seen.severity,
            earlier.first_step if earlier else self.history.step,
            self.history.step,
            seen.evidence,
            check.explanation,
            seen.remedy,
            check.metrics,
        )


def diagnose(
    metrics: Sequence[Metrics], config: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]] = ()
) -> list[Finding]:
    """Check a run by its metrics.

    Args:
        metrics: the lines of `metrics.jsonl`, in order, each with its "step".
        config: the config of the run as nested tables: `config.toml`, or `covey.config.recipe_writing.config_to_dict`.
        evaluations: those of `summary.json`, if the run has ended.

    Returns:
        The findings, problems first, then in the order of their first step; at most one for each check.
    """
    diagnosis = Diagnosis(config)
    for record in metrics:
        diagnosis.add(int(record["step"] or 0), record)
    return diagnosis.findings()
