"""The checks are silent over healthy runs, and every check finds a run that was made sick on purpose.

`helpers/healthy_runs.py` and `helpers/sick_runs.py` have the recipes, and recorded the runs.
"""

from pathlib import Path

import pytest

from covey.tracking.diagnosis import CHECKS, diagnose
from helpers.diagnosed_runs import train_tables
from helpers.diagnosis_records import HEALTHY_FILE, SICK_FILE, read_recorded
from helpers.healthy_runs import COMMANDS, HEALTHY
from helpers.sick_runs import SICK

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


def test_every_check_has_a_sick_run():
    of_policies = [
        check.name for check in CHECKS if not check.metrics[0].startswith("sft/")
    ]  # others: test_supervised.py
    assert sorted(SICK) == sorted(of_policies)


def test_every_check_finds_the_record_of_its_sick_run():
    recorded = {run.name: run for run in read_recorded(SICK_FILE)}
    assert recorded.keys() == SICK.keys()
    assert [name for name, run in recorded.items() if name not in run.found()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_a_check_finds_its_sick_run(name, tmp_path):
    sick = SICK[name]
    metrics, shown, found = train_tables(tmp_path, sick.tables, sick.rewards, sick.change)
    assert len(metrics) == sick.tables["steps"]
    assert name in [finding.check for finding in found]
    assert name in [finding.check for finding in shown], "during training"
    assert len({finding.check for finding in shown}) == len(shown), "each is shown once"
