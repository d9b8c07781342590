"""Diagnosis of a run: named checks over its metrics, step by step or afterwards, each with evidence, an explanation and
a remedy.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.config.fields import command, plural
from covey.config.files import read_below
from covey.config.model_sources import CONFIG_FILE
from covey.config.recipe import read_tables
from covey.tracking.diagnosis import checks, history
from covey.tracking.diagnosis.history import SETTLED, History, Seen, Settings, Severity
from covey.tracking.run_folder import SUMMARY_FILE
from covey.tracking.run_store import read_metrics

TRACKED = ("reward/mean", "reward/std", "score/mean")  # in any case
SKIPPED = "update/skipped_steps"
BESTS = ("reward/std", "score/mean")  # whose highest level is kept
STRIDE = 5  # steps between evaluations of the checks
BRIEF = ("check", "severity", "first_step", "last_step", "remedy")  # of a finding in `summary.json`
HALF_INTERVAL = 1.96  # standard errors, of a 95 % interval

Metrics = Mapping[str, float | None]
HEALTHY_FACTS = (
    "With one optimizer step for each batch of rollouts a loss near 0, a clip fraction of 0 and a ratio of 1 are no "
    "faults: the policy is the one that sampled, and the advantages of a group sum to 0."
)


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
class Check:
    """A named condition over the metrics of a run.

    `find` gets the metrics so far and the settings of the run, and returns None if the condition does not hold or the
    metrics do not suffice.
    """

    name: str
    metrics: tuple[str, ...]  # that it reads; those of the finding
    find: Callable[[History, Settings], Seen | None]
    condition: str  # with its thresholds, for docs/reference/checks.md
    explanation: str
    source: str = ""  # of the thresholds, for docs/reference/checks.md
    keeps_first: bool = False  # evidence and remedy are those of the first observation, not of the last


def _read_checks() -> tuple[Check, ...]:
    thresholds = vars(history) | vars(checks)
    tables = tomllib.loads(Path(__file__).with_name("checks.toml").read_text(encoding="utf-8"))
    return tuple(
        Check(
            name,
            tuple(fields.pop("metrics")),
            find=getattr(checks, name.replace(" ", "_").lower()),
            condition=fields.pop("condition").format_map(thresholds),
            **fields,
        )
        for name, fields in tables.items()
    )


CHECKS = _read_checks()


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


def diagnose_run(run_dir: Path) -> list[Finding]:
    """The findings of a run folder, also of a run that goes on, was stopped or crashed.

    Raises:
        ConfigError: if the folder holds no run, or a file of it is damaged.
        MachineError: if a file cannot be read.
    """
    metrics = read_metrics(run_dir)
    return diagnose(metrics, read_tables(run_dir / CONFIG_FILE), _evaluations(run_dir / SUMMARY_FILE))


def _evaluations(path: Path) -> Sequence[Mapping[str, Any]]:
    """The evaluations of a summary; none if the run has not ended."""
    try:
        found = json.loads(read_below(path.parent, path.name))["evaluations"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(one, dict) for one in found) else []


def brief(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The findings as `summary.json` has them.

    >>> [{"check": "truncation", "severity": "problem", "first_step": 20, "last_step": 60, "remedy": "Try ..."}]
    """
    return [{key: getattr(finding, key) for key in BRIEF} for finding in findings]


def conclusion(summary: Mapping[str, Any]) -> str:
    """One line that names what the checks found in a run, from its summary."""
    findings, steps = summary["findings"], summary["steps"]
    if not findings:
        few = "" if steps >= SETTLED else f"; most of them need {SETTLED} steps"
        return f"Diagnosis: none of {len(CHECKS)} checks found a fault in {plural(steps, 'step')}{few}."
    named = ", ".join(f"{found['check']} ({_steps(found, steps)})" for found in findings)
    return f"Diagnosis: {named}. Evidence and remedies: {command('diagnose', summary['run_dir'])}"


def _steps(found: Mapping[str, Any], steps: int) -> str:
    first, last = found["first_step"], found["last_step"]
    if last >= steps:
        return f"from step {first}"
    return f"step {first}" if first == last else f"steps {first} to {last}"


def write_findings(run_dir: Path) -> str:
    """The findings of `diagnose_run` as text for a terminal."""
    findings, metrics = diagnose_run(run_dir), read_metrics(run_dir)
    settings = Settings(read_tables(run_dir / CONFIG_FILE))
    steps = metrics[-1]["step"] if metrics else 0
    head = f"{run_dir}: {plural(steps, 'step')}"
    if not findings:
        few = "" if steps >= SETTLED else f" Most of them need {SETTLED} steps."
        lines = [f"{head}, none of {len(CHECKS)} checks found a fault.{few}"]
    else:
        lines = [f"{head}, {plural(len(findings), 'finding')} of {len(CHECKS)} checks"]
    for finding in findings:
        lines += [
            "",
            f"{finding.severity}: {finding.check} ({_steps(vars(finding), steps)})",
            f"  {finding.evidence}.",
            f"  {finding.explanation}",
            f"  {sentence(finding.remedy)}",
            f"  metrics: {', '.join(finding.metrics)}",
        ]
    return "\n".join([*lines, "", HEALTHY_FACTS] if settings.optimizer_steps == 1 else lines)


def sentence(words: str) -> str:
    """The words with a capital letter at the beginning and a mark at the end."""
    words = words.strip()
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "?", "!")) else ".")
