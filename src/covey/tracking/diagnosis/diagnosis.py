"""Runs all checks over the metrics of a run, step by step or afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.tracking.diagnosis import completions, policies, rewards, updates
from covey.tracking.diagnosis.finding import Check, Finding, Seen
from covey.tracking.diagnosis.history import History
from covey.tracking.diagnosis.settings import Settings

CHECKS: tuple[Check, ...] = (*rewards.CHECKS, *completions.CHECKS, *policies.CHECKS, *updates.CHECKS)
TRACKED = ("reward/mean", "reward/std", "score/mean")  # in any case
SKIPPED = "update/skipped_steps"
BESTS = ("reward/std", "score/mean")  # whose highest level is kept
STRIDE = 5  # steps between evaluations of the checks
HALF_INTERVAL = 1.96  # standard errors, of a 95 % interval

Metrics = Mapping[str, float | None]


class Diagnosis:
    """The checks of one run, fed step by step. The cost of a step does not grow with the number of steps."""

    def __init__(self, config: Mapping[str, Any], checks: Sequence[Check] = CHECKS) -> None:
        self.settings = Settings(config)
        self.checks = checks
        self.history = History([*TRACKED, *(name for check in checks for name in check.metrics)])
        self._found: dict[str, Finding] = {}
        self._checked = 0

    def add(self, step: int, metrics: Metrics) -> list[Finding]:
        """Add a finished step; returns the findings of checks that had none before."""
        self.history.add(step, metrics)
        score = metrics.get("eval/score")
        if score is not None and math.isfinite(score):
            self.history.add_held_out(step, score, self._held_out_error(score))
        skipped = metrics.get(SKIPPED)  # at once, because a run ends after five in a row
        return self._check() if skipped or self.history.steps % STRIDE == 0 else []

    def finish(self, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Add the held-out scores before and after training, as `summary.json` has them."""
        if not evaluations:
            return
        for step, when in ((0, "before"), (self.history.step, "after")):
            found = evaluations[0].get(when) or {}
            if found.get("score") is not None:
                low, high = found.get("low"), found.get("high")
                error = math.inf if low is None or high is None else (high - low) / 2 / HALF_INTERVAL
                self.history.add_held_out(step, found["score"], error)
        self._checked = 0

    def findings(self) -> list[Finding]:
        """All findings so far, problems first, then in the order of their first step."""
        self._check()
        return sorted(self._found.values(), key=lambda finding: (finding.severity != "problem", finding.first_step))

    def _held_out_error(self, score: float) -> float:
        """Standard error of a live evaluation, if it is an accuracy; else infinite, because its variance is unknown."""
        problems = self.settings.number("evaluation.problems", 0)
        if self.settings.is_control or not 0 <= score <= 1 or problems < 1:
            return math.inf
        return math.sqrt(max(score * (1 - score), 1 / problems) / problems)

    def _check(self) -> list[Finding]:
        if self._checked == self.history.steps:
            return []
        self._checked = self.history.steps
        for name in BESTS:
            self.history.mark_best(name)
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
        if earlier and check.keeps_first:
            return replace(earlier, last_step=self.history.step)
        return Finding(
            check=check.name,
            severity=seen.severity,
            first_step=earlier.first_step if earlier else self.history.step,
            last_step=self.history.step,
            evidence=seen.evidence,
            explanation=seen.explanation or check.explanation,
            remedy=seen.remedy,
            metrics=check.metrics,
        )


def diagnose(
    metrics: Sequence[Metrics], config: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]] = ()
) -> list[Finding]:
    """Check a run by its metrics.

    Args:
        metrics: the lines of `metrics.jsonl`, in order, each with its "step".
        config: the config of the run as nested tables: `config.toml`, or `covey.config.recipe.config_to_dict`.
        evaluations: those of `summary.json`, if the run has ended.

    Returns:
        The findings, problems first, then in the order of their first step; at most one for each check.
    """
    diagnosis = Diagnosis(config)
    for record in metrics:
        diagnosis.add(int(record["step"] or 0), record)
    diagnosis.finish(evaluations)
    return diagnosis.findings()
