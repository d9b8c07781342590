"""`covey compare`: processes side by side, folders that go on where they were, and honest ends."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from covey.cli.main import main
from covey.comparison import compare as module
from covey.comparison.compare import (
    ParallelRunner,
    SeedJob,
    compare,
    find_goal,
    last_step,
    read_contestants,
    runs_at_once,
)
from covey.config import ConfigError, ControlConfig, RunError
from helpers import recorded_runs

TESTS = Path(__file__).resolve().parents[1]


def make_jobs(folder: Path, count: int) -> list[SeedJob]:
    return [SeedJob("x", "x", seed, ControlConfig(steps=4), folder / str(seed)) for seed in range(count)]


def side_by_side(work: Callable[[SeedJob], Any], at_once: int) -> ParallelRunner:
    """With the preload of real runs: the server that processes are forked from is started once, by whoever is first."""
    return ParallelRunner(work, at_once, preload=("covey.experiment.run",), console=Console(file=io.StringIO()))


@pytest.mark.slow
def test_a_few_runs_at_a_time_each_in_its_own_process(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, 5)
    assert side_by_side(recorded_runs.note_others, 2).run(jobs) == {}
    noted = [json.loads((job.run_dir / "noted").read_text()) for job in jobs]
    assert len({pid for pid, _ in noted} | {os.getpid()}) == 6
    assert max(running for _, running in noted) == 2


@pytest.mark.slow
def test_a_run_does_not_inherit_the_peak_memory_of_another(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, 2)
    side_by_side(recorded_runs.measure_memory, 1).run(jobs)
    large, small = (int((job.run_dir / "peak").read_text()) for job in jobs)
    assert large - small > 200 * 2**20


@pytest.mark.slow
def test_a_failed_run_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, 5)
    failures = side_by_side(recorded_runs.fail_sometimes, 2).run(jobs)
    assert sorted(failures) == ["x, seed 1", "x, seed 2", "x, seed 3"]
    assert failures["x, seed 1"] == "the gradient was not finite"
    assert failures["x, seed 2"].startswith("unexpected ZeroDivisionError: a bug; see ")
    assert "ended with code -9" in failures["x, seed 3"]
    assert (tmp_path / "4" / "summary.json").is_file()
    assert (tmp_path / "0" / "output.log").read_text() == "a word for the log\n"
    assert "Traceback" in (tmp_path / "2" / "output.log").read_text()


@pytest.mark.slow
def test_a_mistake_concerns_all_runs_and_stops_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x, seed 0: Box2D is not installed"):
        side_by_side(recorded_runs.mistake, 1).run(make_jobs(tmp_path, 3))
    assert not (tmp_path / "1").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_comparison_leaves_no_run_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.recorded_runs", str(tmp_path)],
        cwd=TESTS,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: all((tmp_path / name / "began").is_file() for name in "01"))
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode != 0
    wait_until(lambda: all((tmp_path / name / "stopped").is_file() for name in "01"))


def test_a_run_that_has_just_started_when_ctrl_c_comes_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = BaseProcess.start

    def interrupted(process: BaseProcess) -> None:
        start(process)
        wait_until(lambda: (tmp_path / "0" / "began").is_file())
        raise KeyboardInterrupt

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(recorded_runs.wait_for_signal, 2).run(make_jobs(tmp_path, 2))
    assert (tmp_path / "0" / "stopped").is_file()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_the_last_step_is_read_past_a_torn_line(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "x": "' + "y" * 200_000 + '"}\n{"step": 3}\n{"st')
    assert last_step(tmp_path) == 3


RECIPE = """
algorithm = "grpo"
steps = 4
[environment]
id = "{environment}"
action_repeat = {repeat}
[rollouts]
starts_per_step = 2
group_size = 4
[evaluation]
episodes = 4
expected_return = {goal}
"""


@pytest.fixture
def recipes(tmp_path: Path) -> list[str]:
    """A recipe that is good and one that is not, by the fake."""
    paths = [tmp_path / "good.toml", tmp_path / "bad.toml", tmp_path / "other.toml"]
    for path, name, repeat, goal in zip(paths, ["CartPole-v1"] * 2 + ["Acrobot-v1"], (1, 2, 1), (475, 450, -100)):  # noqa: B905
        path.write_text(RECIPE.format(environment=name, repeat=repeat, goal=goal))
    return [str(path) for path in paths]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_seed", recorded_runs.train_quickly)


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_a_comparison_writes_its_report_and_goes_on_where_it_was(
    tmp_path: Path, recipes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    compare(recipes[:2], seeds=2, output=folder, jobs=2)
    text = capsys.readouterr().out
    assert "4 runs; 2 at a time" in text
    assert "no difference will be claimed" in text
    assert "is better" not in (folder / "report.md").read_text().replace("called better", "")
    written = {path.name for path in folder.iterdir()}
    pictures = {"learning_curves.png", "metrics.png", "final_scores.png"}
    assert written == {"settings.json", "report.md", "report.json", "good", "bad", "covey.lock"} | pictures

    finished = (folder / "good" / "seed_000" / "summary.json").stat().st_mtime_ns
    (folder / "bad" / "seed_001" / "summary.json").unlink()
    compare(recipes[:2], seeds=4, output=folder, jobs=2)
    text = capsys.readouterr().out
    assert "8 runs, 3 of them finished already" in text
    assert "good, seed 2: done" in text
    assert "good, seed 0: done" not in text
    assert (folder / "good" / "seed_000" / "summary.json").stat().st_mtime_ns == finished
    report = json.loads((folder / "report.json").read_text())
    assert report["threshold"] == 475  # the larger of the two
    assert report["recipes"]["good"]["final"] == {"0": 500.0, "1": 499.0, "2": 498.0, "3": 497.0}
    assert report["pairs"][0]["verdict"] == "good is better"
    assert report["recipes"]["bad"]["to_threshold"]["episodes"]["median"] is None  # never


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_a_folder_belongs_to_one_comparison(tmp_path: Path, recipes: list[str]) -> None:
    folder = tmp_path / "out"
    compare(recipes[:1], seeds=1, output=folder)
    with pytest.raises(ConfigError, match=r"another recipes\.good\.update\.learning_rate: name another with --output"):
        compare(recipes[:1], seeds=1, output=folder, overrides=["--learning-rate", "0.1"])
    with pytest.raises(ConfigError, match=r"another recipes\.bad"):
        compare(recipes[:2], seeds=1, output=folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="is not empty and holds no comparison"):
        compare(recipes[:1], seeds=1, output=tmp_path / "full")
    with pytest.raises(ConfigError, match="cannot write the folder"):
        compare(recipes[:1], seeds=1, output=tmp_path / "full" / "thesis.txt" / "out")


@pytest.mark.slow
def test_failures_are_reported_and_fail_the_command(
    tmp_path: Path, recipes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "train_seed", recorded_runs.fail_sometimes)
    with pytest.raises(RunError, match=r"3 of 5 runs failed .*good, seed 1: the gradient was not finite"):
        compare(recipes[:1], seeds=5, output=tmp_path / "out", jobs=2)
    assert "**good, seed 1 did not finish**" in (tmp_path / "out" / "report.md").read_text()


def test_the_command_refuses_before_anything_runs(
    tmp_path: Path, recipes: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {
        "compare": "RECIPE",
        "compare good.toml nowhere.toml": "there is no recipe nowhere.toml",
        "compare good.toml --group-sizes 4": "did you mean --group-size?",
        "compare good.toml --group-size 1": "set group_size to 2 or more",
        "compare good.toml --seeds 0": "--seeds: must be at least 1",
        "compare good.toml --jobs -1": "--jobs: must be at least 0",
        "compare good.toml --seed 4": "gives every run its own --seed: use --seeds N",
        "compare good.toml --run-dir x": "gives every run its own --run-dir",
        "compare good.toml --threshold nan": "--threshold: must be a finite number",
    }
    for words, expected in cases.items():
        assert main(words.split()) == 2
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_recipes_that_cannot_be_compared_are_refused(recipes: list[str]) -> None:
    good, _, other = recipes
    with pytest.raises(ConfigError, match="good trains on CartPole-v1 and other trains on Acrobot-v1"):
        read_contestants([good, other])
    with pytest.raises(ConfigError, match="two recipes are called good"):
        read_contestants([good, good])
    with pytest.raises(ConfigError, match="its own --seed: use --seeds"):
        read_contestants([good, f"{good} --seed 3"])


def test_a_recipe_may_bring_fields_of_its_own(recipes: list[str]) -> None:
    names = [recipes[0], f"{recipes[0]} --group-size 16"]
    four, sixteen = read_contestants(names, ["--group-size", "8", "--epochs", "2"])
    assert (four.label, sixteen.label) == ("good", "good --group-size 16")
    assert (four.config.rollouts.group_size, sixteen.config.rollouts.group_size) == (8, 16)  # type: ignore[union-attr]
    assert sixteen.config.update.epochs == 2
    assert sixteen.folder == "good_--group-size_16"
    assert find_goal([four, sixteen]) == 475


def test_runs_share_the_cores_by_their_threads(recipes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert runs_at_once(read_contestants(recipes[:1])) == 8
    assert runs_at_once(read_contestants(recipes[:2], ["--threads", "3"])) == 2
    assert runs_at_once(read_contestants(recipes[:1], ["--threads", "0"])) == 1


@pytest.mark.slow
def test_real_runs_and_a_real_resume(tmp_path: Path, recipes: list[str]) -> None:
    folder = tmp_path / "out"
    fields = ["--threads", "1", "--hidden", "8", "--checkpoint.every", "2"]
    compare(recipes[:2], seeds=1, output=folder, jobs=2, overrides=fields)
    before = json.loads((folder / "report.json").read_text())
    run_dir = folder / "good" / "seed_000"
    (run_dir / "summary.json").unlink()
    compare(recipes[:2], seeds=1, output=folder, jobs=2, overrides=fields)
    assert "resuming after step 4" in (run_dir / "output.log").read_text()
    after = json.loads((folder / "report.json").read_text())
    assert after["recipes"]["good"]["final"] == before["recipes"]["good"]["final"]
    assert after["recipes"]["bad"] == before["recipes"]["bad"]


def test_a_folder_of_long_labels_has_a_short_name() -> None:
    names = [module.short_name(f"{'recipe_' * 60}{end}") for end in "ab"]
    assert len({*names}) == 2
    assert max(map(len, names)) <= 140
    assert module.short_name("compare-cartpole_grpo-cartpole_ppo") == "compare-cartpole_grpo-cartpole_ppo"
