"""Limits of the machine as they are: a small disk and a limit on file sizes. One line with the way on, exit code 3."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.cli import main
from covey.config.reader import write_config
from helpers import practice
from helpers.runs import files, reproducible_metrics

STEPS = 8
CONTROL = {
    "algorithm": "ppo",
    "steps": STEPS,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 30},
    "rollouts": {"groups": "fragments", "environments": 2, "fragment_steps": 20},
    "policy": {"hidden": [32]},
    "evaluation": {"episodes": 2},
    "checkpoint": {"every": 2},
    "update": {"minibatches": 2},
}


@dataclass
class Outcome:
    code: int
    output: str
    errors: str


def command(words: list[object], folder: Path, prepare: Callable[[], object] = lambda: None) -> Outcome:
    """`covey` in a fork of this process, in which `prepare` is called first."""
    names = [folder / name for name in ("output", "errors")]
    child = os.fork()
    if child == 0:
        code = 99
        try:
            for number, name in enumerate(names, start=1):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
            import sys

            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            prepare()
            code = main([str(word) for word in words])
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Outcome(code, *(name.read_text() for name in names))


def way_on(outcome: Outcome, place: str, run_dir: Path, words: list[object]) -> list[object]:
    """The command that the line of the error names."""
    assert outcome.code == 3, outcome
    (line,) = outcome.errors.splitlines()
    assert re.match(rf"error: .*{place}.*; then (go on with|start the run again)", line), line
    _, _, resume = line.partition("; then go on with: covey ")
    if resume:
        assert shlex.split(resume) == ["train", "--resume", str(run_dir)]
    return shlex.split(resume) or words


def assert_same(run_dir: Path, whole: Path) -> None:
    assert reproducible_metrics(run_dir) == reproducible_metrics(whole)
    for part in ("model", "rollouts"):
        assert files(run_dir / part) == files(whole / part)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a run of it that nothing disturbed."""
    folder = tmp_path_factory.mktemp("machine")
    write_config(practice.read(CONTROL), folder / "recipe.toml")
    outcome = command(["train", folder / "recipe.toml", "--run-dir", folder / "whole"], folder)
    assert outcome.code == 0, outcome
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Mounts a disk of so many bytes at tmp_path/disk, or gives the one there another size or mode."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> None:
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")

    yield mount
    subprocess.run(["umount", str(disk)], check=False, capture_output=True)


@pytest.mark.parametrize("kilobytes", [12, 120])
def test_a_real_disk_that_is_full(
    kilobytes: int, place: Path, tmp_path: Path, small_disk: Callable[[str], None]
) -> None:
    small_disk(f"size={kilobytes}k")
    run_dir = tmp_path / "disk" / "run"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]
    outcome = command(words, place)
    again = way_on(outcome, "free some space on that disk", run_dir, words)
    small_disk("remount,size=50m")
    outcome = command(again, place)
    assert outcome.code == 0, outcome
    assert_same(run_dir, place / "whole")


@pytest.mark.parametrize("kilobytes", [1, 8])
def test_a_limit_on_the_size_of_files(kilobytes: int, place: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words: list[object] = ["train", place / "recipe.toml", "--run-dir", run_dir]
    size = kilobytes * 1024
    outcome = command(words, tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    outcome = command(way_on(outcome, "ulimit -f", run_dir, words), tmp_path)
    assert outcome.code == 0, outcome
    assert_same(run_dir, place / "whole")
