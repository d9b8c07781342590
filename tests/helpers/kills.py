"""Kills runs at random moments, resumes them, and compares them with one that was not interrupted.

A moment is a number of function calls after a step was recorded, so it is the same one every time.
"""

import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from covey.config import ConfigError
from covey.tracking.run_folder import FolderLock
from helpers.run_helpers import CALLS_OF_A_STEP, Moment, assert_same_run, covey, start

MOST_IN_A_CHAIN = 10  # kills of one run

Draw = Callable[[random.Random, int], Moment]  # a random moment after a step


def anywhere(rng: random.Random, step: int) -> Moment:
    """Any moment after a step."""
    return Moment(step, rng.randrange(CALLS_OF_A_STEP))


def inside(function: str, calls: int) -> Draw:
    """Moments at most so many calls after a step's first call of a function."""
    return lambda rng, step: Moment(step, rng.randrange(calls), inside=function)


@dataclass
class Kills:
    """Kills of one kind of run. `place`: the folder of its runs; `name`: seed of its moments, and name of its runs."""

    name: str
    words: Sequence[object]  # of a new run, without its folder
    steps: int
    place: Path
    command: str = "train"  # that resumes it

    @property
    def whole(self) -> Path:
        """The folder of an uninterrupted run, which is made if it is not there."""
        folder = self.place / f"{self.name} whole"
        if not folder.exists():
            code, output = covey(*self.words, "--run-dir", folder, cwd=self.place)
            assert code == 0, output
        return folder

    def kill(self, draws: Sequence[Draw]) -> None:
        """Kill runs at a moment of each kind, in chains, and compare each with the whole run after it has ended."""
        rng, waiting = random.Random(self.name), list(draws)
        while waiting:
            run_dir = self.place / f"{self.name} killed"
            words: list[object] = [*self.words, "--run-dir", run_dir]
            chain: list[Moment] = []
            for _ in range(min(rng.randint(1, MOST_IN_A_CHAIN), len(waiting))):
                saved = max([int(path.name[5:]) for path in run_dir.glob("checkpoints/step-*")], default=0)
                step = rng.randint(min(saved + 1, self.steps - 1), self.steps - 1)
                chain.append(waiting[0](rng, step))
                if not kill_at(words, chain[-1], run_dir, self.place):
                    break
                waiting.pop(0)
                words = [*self.command.split(), "--resume", run_dir]
            try:
                # A finished training on examples is not resumed.
                ended = self.command != "train" and (run_dir / "summary.json").exists()
                code, output = covey(*words, cwd=self.place) if "--resume" in words and not ended else (0, "")
                assert code == 0, output
                assert_same_run(run_dir, self.whole)
            except AssertionError as error:
                error.add_note(f"{self.name}, killed at {chain}")
                raise
            shutil.rmtree(run_dir)


def kill_at(words: Sequence[object], moment: Moment, run_dir: Path, place: Path) -> bool:
    """Begin a command, stop it at the moment, see that its folder is locked, and kill it; False if it ended before."""
    process = start(*words, cwd=place, moment=replace(moment, signal=signal.SIGSTOP))
    while process.poll() is None and not is_stopped(process.pid):
        time.sleep(0.002)
    if process.poll() is None:
        with pytest.raises(ConfigError, match=re.escape(f"{run_dir} is being written by process {process.pid}: wait")):
            FolderLock(run_dir)
        process.send_signal(signal.SIGKILL)
    code, output = process.ended()
    assert code in (0, -signal.SIGKILL), output
    return code != 0


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return False
