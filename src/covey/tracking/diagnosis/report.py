"""The diagnosis of a run folder, and the texts of a diagnosis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config.fields import command, plural
from covey.config.files import read_below
from covey.config.recipe import read_tables
from covey.tracking.diagnosis.diagnosis import CHECKS, diagnose
from covey.tracking.diagnosis.finding import Finding, sentence
from covey.tracking.diagnosis.history import SETTLED
from covey.tracking.diagnosis.settings import Settings
from covey.tracking.run_store import CONFIG_FILE, SUMMARY_FILE, read_metrics

HEALTHY_FACTS = (
    "With one optimizer step for each batch of rollouts a loss near 0, a clip fraction of 0 and a ratio of 1 are no "
    "faults: the policy is the one that sampled, and the advantages of a group sum to 0."
)


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
    return [
        {
            "check": finding.check,
            "severity": finding.severity,
            "first_step": finding.first_step,
            "last_step": finding.last_step,
            "remedy": finding.remedy,
        }
        for finding in findings
    ]


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


def write_findings(run_dir: Path, findings: Sequence[Finding]) -> str:
    """The findings of a run as text for a terminal."""
    metrics, settings = read_metrics(run_dir), Settings(read_tables(run_dir / CONFIG_FILE))
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
