"""Every file operation of a run fails once, as on a full, read-only or broken disk or without permission: one line that
names the path and the way on, exit code 3, and that way leads to the same bits. A process may also end at each of them.

A small library in C (`helpers/file_faults.c`) stands before libc in the processes of the runs, so that operations of
Python, of safetensors (Rust), of matplotlib and of transformers fail alike.
"""

import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.config.recipe import write_config
from helpers import toy_envs
from helpers.forks import Case, Forks, Outcome
from helpers.run_helpers import assert_same_run, write_recipe
from helpers.tiny_models import tiny_folder

OPEN_READ, READ, OPEN_WRITE, WRITE, RENAME, REMOVE = 1, 2, 4, 8, 16, 32  # as in file_faults.c
CHANGES = OPEN_WRITE | WRITE | RENAME | REMOVE
KILL = 0  # in place of an errno
# Which operations fail so, and whether all that follow do too.
FAULTS = {
    errno.ENOSPC: (OPEN_WRITE | WRITE | RENAME, True),
    errno.EROFS: (CHANGES, True),
    errno.EIO: (CHANGES | OPEN_READ | READ, False),
    errno.EACCES: (OPEN_READ | OPEN_WRITE | RENAME | REMOVE, True),
    errno.EDQUOT: (WRITE, True),
    errno.EFBIG: (WRITE, True),
    KILL: (CHANGES, False),
}
NAMES = {number: errno.errorcode.get(number, "SIGKILL") for number in FAULTS}
CONTROL = {
    "algorithm": "ppo",
    "steps": 5,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 30},
    "rollouts": {"kind": "fragments", "environments": 2, "fragment_steps": 20, "reward_scaling": "running_std"},
    "policy": {"hidden": [4], "normalise_observations": True},
    "evaluation": {"episodes": 2},
    "checkpoint": {"every": 2},
    "update": {"minibatches": 2},
}


@dataclass
class Place:
    """Where runs fail, and the process that they are forked from."""

    folder: Path
    forks: Forks
    recipes: dict[str, Path]

    def case(self, words: Sequence[object], fault: tuple[int, int] = (KILL, 0), marker: str = "") -> Case:
        """A command; `fault` is an errno (or KILL) and the number of the operation that meets it first."""
        code, at = fault
        mask, lasting = FAULTS[code]
        settings = f"/{marker}/ {mask} {at} {code} {int(lasting)} {self.folder / f'counts-{marker}'}"
        return Case(
            marker, tuple(map(str, words)), str(self.folder), {"FILE_FAULT": settings} if marker else {}, seconds=300
        )

    def whole(self, kind: str) -> Path:
        """A run that nothing disturbed."""
        run_dir = self.folder / f"whole-{kind}"
        if not run_dir.exists():
            (outcome,) = self.forks.run([self.case(["train", self.recipes[kind], "--run-dir", run_dir])])
            assert outcome.code == 0, outcome
        return run_dir

    def half(self, kind: str) -> Path:
        """A run that was killed when it put its second checkpoint in place."""
        run_dir = self.folder / f"half-{kind}" / "run"
        number = 0
        while not (run_dir / "checkpoints" / "step-00000002").exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            number += 20
            words = ["train", self.recipes[kind], "--run-dir", run_dir]
            self.forks.run([self.case(words, (KILL, number), run_dir.parent.name)])
        return run_dir


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("faults")
    library = folder / "file_faults.so"
    source = Path(__file__).parents[1] / "helpers" / "file_faults.c"
    built = subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], capture_output=True)
    if built.returncode:
        pytest.skip(f"no C compiler makes a library here: {built.stderr.decode()[:200]}")
    control = folder / "control.toml"
    write_config(toy_envs.read(CONTROL), control)
    language = write_recipe(folder, tiny_folder(folder / "model"), steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        forks = Forks()
    with forks:
        yield Place(folder, forks, {"control": control, "language": language})


def count(place: Place, kind: str, code: int, resume: bool) -> int:
    """How many operations a run has that can fail in this way."""
    marker = f"count-{kind}-{NAMES[code]}-{resume}"
    (outcome,) = place.forks.run([place.case(words_for(place, kind, marker, resume), (code, 0), marker)])
    assert outcome.code == 0, outcome
    counts = place.folder / f"counts-{marker}"
    total = counts.stat().st_size
    shutil.rmtree(place.folder / marker)
    counts.unlink()
    return total


def words_for(place: Place, kind: str, marker: str, resume: bool) -> list[object]:
    """A new run in the folder that the marker names, or the second half of one."""
    run_dir = place.folder / marker / "run"
    if resume:
        shutil.copytree(place.half(kind), run_dir)
        return ["train", "--resume", run_dir]
    return ["train", place.recipes[kind], "--run-dir", run_dir]


def way_on(outcome: Outcome, words: Sequence[object], run_dir: Path) -> list[str]:
    """The command that the one line of an error names; after a kill the one that a user would give."""
    if outcome.code == -signal.SIGKILL:
        began = (run_dir / "metrics.jsonl").is_file() and (run_dir / "metrics.jsonl").stat().st_size
        return ["train", "--resume", str(run_dir)] if began else list(map(str, words))
    assert outcome.code == 3, outcome
    (line,) = outcome.errors.splitlines()
    assert line.startswith("error: "), outcome
    assert "unexpected" not in line + outcome.output
    assert str(run_dir.parent) in line
    advice = re.search(r"then (?:go on with|start again with): covey (.*)$", line)
    if advice and advice[1]:
        return shlex.split(advice[1])
    assert "--resume" not in words or "; then" not in line, line
    return list(map(str, words))  # before the folder is open the way on is the command itself


def fail_at(place: Place, kind: str, code: int, numbers: Sequence[int], resume: bool = False) -> int:
    """Let each of these operations fail, and follow the advice; how many runs failed."""
    cases, words = [], {}
    for number in numbers:
        marker = f"{kind}-{NAMES[code]}-{number}-{resume}"
        words[marker] = words_for(place, kind, marker, resume)
        cases.append(place.case(words[marker], (code, number), marker))
    outcomes = dict(zip(words, place.forks.run(cases), strict=True))
    again = {
        marker: place.case(way_on(outcome, words[marker], place.folder / marker / "run"))
        for marker, outcome in outcomes.items()
        if outcome.code != 0  # else the operation was one that a run can do without, such as tidying up
    }
    for marker, outcome in zip(again, place.forks.run(list(again.values())), strict=True):
        assert outcome.code == 0, (marker, outcomes[marker], outcome)
    for marker in words:
        assert_same_run(place.folder / marker / "run", place.whole(kind))
        shutil.rmtree(place.folder / marker)
        os.remove(place.folder / f"counts-{marker}")
    return len(again)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("code", FAULTS, ids=NAMES.get)
@pytest.mark.parametrize("resume", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize(("kind", "every"), [("control", 1), ("language", 7)])
def test_every_file_operation_fails(place: Place, kind: str, every: int, resume: bool, code: int) -> None:
    """Each of them in a run on CartPole, every seventh in one on a language model."""
    total = count(place, kind, code, resume)
    numbers = range(1, total + 1, every)
    failed = fail_at(place, kind, code, numbers, resume)
    print(f"{kind}, {'resumed' if resume else 'new'}, {NAMES[code]}: {len(numbers)} of {total}, {failed} runs failed")
    assert failed > len(numbers) // 2
