"""Diagnosis of a run: named checks over its metrics, each with evidence, an explanation and a remedy."""

from covey.tracking.diagnosis.diagnosis import (
    CHECKS,
    Diagnosis,
    Finding,
    brief,
    conclusion,
    diagnose,
    diagnose_run,
    write_findings,
)

__all__ = ["CHECKS", "Diagnosis", "Finding", "brief", "conclusion", "diagnose", "diagnose_run", "write_findings"]
