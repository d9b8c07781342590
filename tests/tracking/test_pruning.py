"""Pruning removes old checkpoints of finished runs, and nothing else, inside the run folder only."""

import json
import os
from pathlib import Path

import pytest

from covey.config import ConfigError
from covey.runtime.checkpoint import CheckpointFolder
from covey.tracking.run_folder import FolderLock
from covey.tracking.run_overview import Pruning, plan_pruning, prune
from helpers.run_folders import add_checkpoint, language_run


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


def planned(run: Path, keep: int = 1) -> Pruning:
    plan = plan_pruning(run, keep)
    assert plan is not None
    return plan


def test_the_newest_and_the_best_checkpoint_stay(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", checkpoints=(1, 2, 3, 4))
    (run / "checkpoints" / "best.json").write_text(json.dumps({"step": 2}))
    plan = planned(run)
    assert plan.removed == ("step-00000001", "step-00000003")
    assert plan.kept == ("step-00000002 (best)", "step-00000004 (newest)")
    assert 2000 < plan.bytes < 3000
    assert len(names(run)) == 5  # planning removes nothing
    prune(plan)
    assert names(run) == ["best.json", "step-00000002", "step-00000004"]
    assert plan_pruning(run) is None


def test_more_of_the_newest_stay_on_request(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", checkpoints=(1, 2, 3, 4))
    assert planned(run, keep=3).removed == ("step-00000001",)
    assert plan_pruning(run, keep=4) is None


@pytest.mark.parametrize("state", ["stopped", "crashed"])
def test_a_run_that_can_be_resumed_keeps_everything(state: str, tmp_path: Path) -> None:
    assert plan_pruning(language_run(tmp_path / "run", state=state, checkpoints=(2, 4))) is None


def test_a_running_run_is_not_touched(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", checkpoints=(2, 4))
    plan = planned(run)
    with FolderLock(run):
        assert plan_pruning(run) is None
        with pytest.raises(ConfigError, match="is being written by process"):
            prune(plan)  # it began in the meantime
    (run / "summary.json").unlink()
    prune(plan)  # it was resumed and then stopped in the meantime
    assert names(run) == ["step-00000002", "step-00000004"]


def test_a_damaged_newest_checkpoint_is_no_reason_to_remove_the_one_before(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", checkpoints=(1, 2, 4))
    (run / "checkpoints" / "step-00000004" / "tensors.safetensors").write_bytes(b"short")
    plan = planned(run)
    assert plan.kept == ("step-00000002 (newest)",)
    assert "step-00000002" not in plan.removed
    for step in (1, 2):
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("[]")
    assert plan_pruning(run) is None


def test_links_are_neither_followed_nor_removed(tmp_path: Path) -> None:
    outside = language_run(tmp_path / "outside", checkpoints=(1, 2, 3))
    run = language_run(tmp_path / "run", checkpoints=(2, 4))
    (run / "checkpoints" / "step-00000001").symlink_to(outside / "checkpoints" / "step-00000001")
    (run / "checkpoints" / ".unfinished-x").symlink_to(outside)
    (run / "checkpoints" / "step-00000002" / "state.json").unlink()
    (run / "checkpoints" / "step-00000002" / "state.json").symlink_to(outside / "config.toml")
    prune(planned(run))
    assert names(run) == [".unfinished-x", "step-00000001", "step-00000004"]
    assert (outside / "config.toml").is_file()
    linked = language_run(tmp_path / "linked")
    (linked / "checkpoints").symlink_to(outside / "checkpoints")
    assert plan_pruning(linked) is None
    assert len(names(outside)) == 3


def test_a_folder_that_became_a_link_after_the_plan_is_not_followed(tmp_path: Path) -> None:
    outside = language_run(tmp_path / "outside", checkpoints=(1, 2))
    run = language_run(tmp_path / "run", checkpoints=(1, 2))
    plan = planned(run)
    (run / "checkpoints").rename(run / "moved")
    (run / "checkpoints").symlink_to(outside / "checkpoints")
    with pytest.raises(Exception, match="checkpoints"):
        prune(plan)
    assert len(names(outside)) == 2


def test_files_that_covey_does_not_write_stay(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", checkpoints=(1, 2, 4))
    (run / "checkpoints" / "step-00000001" / "notes.txt").write_text("mine")
    (run / "checkpoints" / "mine").mkdir()
    (run / "checkpoints" / ".unfinished-00000009").mkdir()  # of an interrupted save
    plan = planned(run)
    assert plan.removed == (".unfinished-00000009", "step-00000002")


def test_a_pruned_run_has_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Of real checkpoints, written and read by the class that resumes runs."""
    run = language_run(tmp_path / "run")
    checkpoints = CheckpointFolder(run / "checkpoints", keep=3)
    for step in (2, 3, 4):
        checkpoints.save(step, {"step": step})
    prune(planned(run))
    assert checkpoints.steps() == [4]
    assert checkpoints.latest() == 4
    assert checkpoints.load(4) == {"step": 4}


def test_a_run_without_checkpoints_has_nothing_to_remove(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    assert plan_pruning(run) is None
    add_checkpoint(run, 4)
    assert plan_pruning(run) is None
