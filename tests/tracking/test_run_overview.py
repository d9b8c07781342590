"""The list of runs: state, steps, result, size and age of each, from the files of its folder; old checkpoints."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from covey.config import ConfigError
from covey.config.model_sources import best_step
from covey.runtime.checkpoint import CheckpointFolder
from covey.tracking.run_folder import FolderLock
from covey.tracking.run_overview import (
    SORT_KEYS,
    Pruning,
    age_text,
    folder_bytes,
    overview,
    overview_table,
    plan_pruning,
    prune,
    result_text,
    size_text,
)
from covey.tracking.wording import LOSS
from helpers.run_folders import add_checkpoint, control_run, language_run


def printed(*folders: Path, now: float | None = None) -> str:
    console = Console(width=300)
    with console.capture() as capture:
        console.print(overview_table([overview(folder) for folder in folders], now))
    return capture.get()


def test_a_finished_run_has_its_result_with_the_interval(tmp_path: Path) -> None:
    run = overview(language_run(tmp_path / "run"))
    assert (run.state, run.recipe, run.algorithm, run.seed, run.step, run.steps) == ("finished", "my", "grpo", 7, 4, 4)
    assert run.kind is not None
    assert run.kind.name == "accuracy"
    assert result_text(run) == "25.0% -> 75.0% (60.0 to 90.0)"
    assert run.change == pytest.approx(0.5)
    assert result_text(overview(control_run(tmp_path / "agent"))) == "9.00 -> 500.0 (490.0 to 500.0)"


@pytest.mark.parametrize("state", ["stopped", "crashed"])
def test_a_run_without_an_end_has_its_last_evaluation(state: str, tmp_path: Path) -> None:
    run = overview(language_run(tmp_path / "run", state=state))
    assert run.state == state
    assert result_text(run) == "25.0% -> 50.0% so far"


def test_a_run_that_has_just_begun_has_no_result(tmp_path: Path) -> None:
    folder = language_run(tmp_path / "run", state="crashed")
    for name in ("metrics.jsonl", "origin.json"):
        (folder / name).write_text("")
    with FolderLock(folder):
        run = overview(folder)
        assert (run.state, run.step, result_text(run)) == ("running", 0, "-")
        assert "0/4" in printed(folder)


def test_damaged_files_leave_gaps_and_raise_nothing(tmp_path: Path) -> None:
    folder = language_run(tmp_path / "run")
    for name in ("summary.json", "origin.json", "config.toml"):
        (folder / name).write_text('{"evaluations": [3], "seed": ')
    run = overview(folder)
    assert (run.recipe, run.seed, run.steps, run.kind, run.before) == (None, None, None, None, None)
    assert "-" in printed(folder)


def test_wrong_types_in_a_summary_are_no_result(tmp_path: Path) -> None:
    folder = language_run(tmp_path / "run")
    for evaluations in (
        [{"before": {"score": "0.5", "count": 3}}],
        [[]],
        "x",
        [{"before": {"score": 1e999, "count": 1}}],
    ):
        (folder / "summary.json").write_text(json.dumps({"evaluations": evaluations, "seed": [], "recipe": 3}))
        (folder / "origin.json").write_text("{}")
        assert overview(folder).before is None


def test_sizes_leave_out_what_links_lead_to(tmp_path: Path) -> None:
    folder = language_run(tmp_path / "run")
    (tmp_path / "large").write_bytes(bytes(10_000_000))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "large").write_bytes(bytes(10_000_000))
    before = folder_bytes(folder)[0]
    (folder / "link").symlink_to(tmp_path / "large")
    (folder / "linked").symlink_to(tmp_path / "outside")
    add_checkpoint(folder, 4, size=5000)
    total, of_checkpoints = folder_bytes(folder)
    assert 5000 < of_checkpoints < 6000
    assert of_checkpoints <= total - before < of_checkpoints + 1000


def test_the_order_of_runs(tmp_path: Path) -> None:
    good, open_ended = language_run(tmp_path / "b"), language_run(tmp_path / "a", steps=9, state="crashed")
    agent = control_run(tmp_path / "c")
    for age, folder in enumerate((good, agent, open_ended)):
        for path in (folder, *folder.iterdir()):
            os.utime(path, (1e9 - age, 1e9 - age))
    runs = [overview(folder) for folder in (agent, good, open_ended)]

    def order(key: str) -> str:
        return "".join(run.path.name for run in sorted(runs, key=SORT_KEYS[key]))

    assert order("changed") == "bca"
    assert order("name") == "abc"
    assert order("score") == "cba"
    assert order("change") == "cba"
    assert order("step")[0] == "a"
    assert order("state")[2] == "a"


def test_the_best_of_two_losses_is_the_lower_one(tmp_path: Path) -> None:
    run = overview(language_run(tmp_path / "run"))
    low, high = (replace(run, kind=LOSS, before={"score": 2.0}, after={"score": after}) for after in (1.0, 3.0))
    unknown = replace(low, after=None)
    for key in ("score", "change"):
        assert sorted([unknown, high, low], key=SORT_KEYS[key]) == [low, high, unknown]


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    folder = language_run(tmp_path / "x\x1b[2J[bold]\u202ey")
    shown = printed(folder)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[bold]" in shown


def test_ages_and_sizes_in_words(tmp_path: Path) -> None:
    assert [age_text(seconds) for seconds in (-5, 59, 60, 7300, 86400 * 3.5)] == ["now", "now", "1 min", "2 h", "3 d"]
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 123_456: "123 kB", 1_500_000_000: "1.5 GB", 10**16: "10000 TB"}
    assert {count: size_text(count) for count in sizes} == sizes


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


def test_the_best_checkpoint_with_which_a_run_goes_on_stays(tmp_path: Path) -> None:
    """The evaluation after the last step was the best, and is none of a longer run."""
    run = language_run(tmp_path / "run", checkpoints=(1, 2, 3))
    checkpoints = CheckpointFolder(run / "checkpoints", keep=4, keep_best=True)
    checkpoints.save(4, {"progress": {"step": 4, "best_step": 2}}, 2)
    checkpoints.name_best(4)
    plan = planned(run)
    assert plan.kept == ("step-00000002 (best if the run goes on)", "step-00000004 (newest and best)")
    prune(plan)
    checkpoints.tidy(4, 2)  # as a run that goes on
    assert best_step(run) == 2


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
