"""The list of runs: state, steps, result, size and age of each, from the files of its folder."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from covey.tracking.run_folder import FolderLock
from covey.tracking.run_overview import (
    SORT_KEYS,
    age_text,
    folder_bytes,
    overview,
    overview_table,
    result_text,
    size_text,
)
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
