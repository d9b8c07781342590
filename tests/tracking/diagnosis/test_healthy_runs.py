"""The checks are silent over healthy runs. `helpers/healthy_runs.py` has their recipes, and recorded them."""

from pathlib import Path

import pytest

from covey.tracking.diagnosis import diagnose
from helpers.diagnosed_runs import train_tables
from helpers.diagnosis_records import HEALTHY_FILE, SICK_FILE, read_recorded
from helpers.healthy_runs import COMMANDS, HEALTHY

PAGE = Path(__file__).parents[3] / "docs" / "healthy.md"
RECORDED = read_recorded(HEALTHY_FILE)
AGAIN = "tiny digits, grpo"  # which is trained again, to see that the record is of this code


def test_all_runs_are_recorded():
    assert [run.name for run in RECORDED] == [*HEALTHY, *COMMANDS]
    assert len(RECORDED) >= 20


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run.name)
def test_nothing_is_found_in_a_healthy_run(run):
    assert [finding.line for finding in diagnose(run.metrics, run.config, run.evaluations)] == []


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run.name)
def test_a_healthy_run_has_learnt(run):
    """Its score is higher at the end than at the beginning: a run that does not learn is not healthy."""
    scores = [record["score/mean"] for record in run.metrics if record.get("score/mean") is not None]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5


@pytest.mark.slow
def test_a_recorded_run_trains_again(tmp_path):
    (recorded,) = [run for run in RECORDED if run.name == AGAIN]
    metrics, shown, found = train_tables(tmp_path, HEALTHY[AGAIN].tables, HEALTHY[AGAIN].rewards)
    assert not shown
    assert not found
    assert len(metrics) == len(recorded.metrics)
    assert metrics[0]["score/mean"] == pytest.approx(recorded.metrics[0]["score/mean"], abs=1e-5)


def test_the_page_quotes_what_the_checks_say():
    recorded = {run.name: run for run in read_recorded(SICK_FILE)}
    for name in ("reward hacking", "entropy collapse", "truncation", "critic that explains nothing"):
        run = recorded[name]
        (finding,) = [finding for finding in diagnose(run.metrics, run.config) if finding.check == name]
        assert f"> {finding.line}\n" in PAGE.read_text(encoding="utf-8")
