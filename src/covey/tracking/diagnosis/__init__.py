"""Diagnosis of a run: named checks over its metrics, each with evidence, an explanation and a remedy."""

from covey.tracking.diagnosis.diagnosis import CHECKS, Diagnosis, diagnose
from covey.tracking.diagnosis.finding import Finding
from covey.tracking.diagnosis.report import brief, conclusion, diagnose_run

__all__ = ["CHECKS", "Diagnosis", "Finding", "brief", "conclusion", "diagnose", "diagnose_run"]
