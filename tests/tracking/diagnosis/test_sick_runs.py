"""Every check finds a run that was made sick on purpose. `helpers/sick_runs.py` has the recipes."""

import pytest

from covey.tracking.diagnosis import CHECKS
from helpers.diagnosed_runs import train_tables
from helpers.diagnosis_records import SICK_FILE, read_recorded
from helpers.sick_runs import SICK


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
