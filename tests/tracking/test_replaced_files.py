"""Each file of a run folder is replaced by a pipe or by a link out of it: every command that reads it answers."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import gymnasium  # noqa: F401 -- before the tests: it changes the environment when it is first imported
import pytest

from covey.cli.main import main
from covey.comparison.compare import last_step
from covey.config import ConfigError, MachineError
from covey.experiment.advice import read_launch
from covey.tracking.curve import read_iterations, run_figure
from covey.tracking.run_folder import METRICS_FILE
from covey.tracking.run_store import RunStore, digests, read_metrics
from covey.tracking.trackers import read_position
from helpers.run_folders import language_run

DEADLINE_SECONDS = 120  # of a command that waits for the other end of a pipe
TINY = "--steps 2 --environments 1 --fragment-steps 4 --minibatches 1 --evaluation.episodes 2 --checkpoint.every 1"
SECRET = "secret of another folder"
COMMANDS = (
    "show {run}",
    "runs {root}",
    "runs prune {root}",
    "diagnose {run}",
    "runs export {run} {root}/out.jsonl",
    "report {run} --output {root}/page.html",
    "eval {run} --episodes 1",
)
RESUME = "train --resume {run}"


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    def ended(*_: object) -> None:
        raise AssertionError("it waits for the other end of a pipe")

    before = signal.signal(signal.SIGALRM, ended)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("agent") / "run"
    assert main(["train", "cartpole_ppo", *TINY.split(), "--run-dir", str(folder)]) == 0
    return folder


def replaced(run: Path, root: Path, name: str, kind: str) -> Path:
    """A copy of a run with one file replaced."""
    copy = root / "run"
    shutil.copytree(run, copy)
    (copy / name).unlink()
    if kind == "pipe":
        os.mkfifo(copy / name)
    else:
        (root / "other").write_text(SECRET)
        (copy / name).symlink_to(root / "other")
    return copy


def answer(words: str, run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    signal.alarm(DEADLINE_SECONDS)
    code = main(words.format(run=run, root=run.parent).split())
    out, err = capsys.readouterr()
    assert code in (0, 1, 2, 3), (words, out, err)
    assert "Traceback" not in out + err, (words, out, err)
    assert "unexpected" not in out + err, (words, out, err)
    assert SECRET not in out + err, (words, out, err)
    if code:
        assert len(err.strip().splitlines()) == 1, (words, out, err)
    return err


def names(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_readers_answer_whatever_file_is_replaced(
    agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    found = names(agent)
    assert {"config.toml", "metrics.jsonl", "origin.json", "summary.json", "covey.lock"} <= set(found)
    for number, name in enumerate(found):
        (tmp_path / str(number)).mkdir()
        run = replaced(agent, tmp_path / str(number), name, kind)
        for words in COMMANDS:
            answer(words, run, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_resuming_answers_whatever_file_is_replaced(
    agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for number, name in enumerate(names(agent)):
        (tmp_path / str(number)).mkdir()
        run = replaced(agent, tmp_path / str(number), name, kind)
        (run / "summary.json").unlink()
        answer(RESUME, run, capsys)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_each_reader_of_python_answers(tmp_path: Path, kind: str) -> None:
    """Also of files that the run of an agent does not have."""
    run = language_run(tmp_path / "run", checkpoints=[2])
    other = tmp_path / "other"
    other.write_text(SECRET)
    for name in (METRICS_FILE, "iterations.jsonl", "origin.json", "summary.json", "rollouts/step_000002.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name) if kind == "pipe" else (run / name).symlink_to(other)
    signal.alarm(DEADLINE_SECONDS)
    for refused in (lambda: read_metrics(run), lambda: run_figure(run), lambda: RunStore(run, resume=True)):
        with pytest.raises((ConfigError, MachineError)) as raised:
            refused()
        assert str(run) in str(raised.value)
        assert len(str(raised.value).splitlines()) == 1
    assert last_step(run) == 0
    assert read_iterations(run) == []
    assert read_launch(run) is None
    assert digests(run / "rollouts" / "step_000002.jsonl") == {}
    assert read_position(run / "origin.json") is None
