"""Runs of every kind, killed at random moments and resumed: the same bits, and the lock in force until the kill.

A moment is a number of function calls after a step was recorded, so it is the same one every time.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from covey.config import ConfigError
from covey.config.recipe_writing import write_config
from covey.tracking.run_folder import FolderLock
from helpers import toy_envs
from helpers.run_helpers import (
    CALLS_OF_A_STEP,
    Moment,
    assert_same_run,
    covey,
    reproducible_metrics,
    start,
    write_recipe,
)
from helpers.tiny_models import tiny_folder

STEPS = 8
CONTROL = {
    "steps": STEPS,
    "seed": 3,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 60},
    "update": {"learning_rate": 0.0003, "schedule": "linear"},
    "policy": {"normalise_observations": True},
    "evaluation": {"episodes": 3, "every": 3},
    "checkpoint": {"every": 2},
}
FRAGMENTS = {"kind": "fragments", "environments": 4, "fragment_steps": 40, "reward_scaling": "running_std"}
KINDS = {
    "GRPO": [],
    "PPO with a critic": ["--algorithm", "ppo", "--critic-warmup-steps", "2", "--critic-epochs", "1"],
    "CartPole groups": {"rollouts": {"starts_per_step": 4, "group_size": 4}},
    "CartPole fragments": {"algorithm": "ppo", "rollouts": FRAGMENTS, "update": {"minibatches": 2, "critic_epochs": 2}},
}
MOST_IN_A_CHAIN = 10  # kills of one run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


def train(kind: str, place: Path) -> list[object]:
    """The words of a new run of this kind."""
    more = KINDS[kind]
    recipe = place / f"{kind}.toml"
    if isinstance(more, dict):
        if not recipe.exists():
            write_config(toy_envs.read(CONTROL, **more), recipe)
        return ["train", recipe]
    if not recipe.exists():
        write_recipe(place, tiny_folder(place / "model"), STEPS).rename(recipe)
    return ["train", recipe, *more]


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return False


def kill_at(words: list[object], moment: Moment, run_dir: Path, place: Path) -> bool:
    """Begin a command, stop it at the moment, see that its folder is locked, and kill it; False if it ended before."""
    process = start(*words, cwd=place, moment=moment)
    while process.poll() is None and not is_stopped(process.pid):
        time.sleep(0.002)
    if process.poll() is None:
        with pytest.raises(ConfigError, match=re.escape(f"{run_dir} is being written by process {process.pid}: wait")):
            FolderLock(run_dir)
        process.send_signal(signal.SIGKILL)
    code, output = process.ended()
    assert code in (0, -signal.SIGKILL), output
    return code != 0


def kill_many_times(kind: str, kills: int, place: Path) -> None:
    rng = random.Random(kind)
    whole = place / f"{kind} whole"
    if not whole.exists():
        code, output = covey(*train(kind, place), "--run-dir", whole, cwd=place)
        assert code == 0, output
    metrics = reproducible_metrics(whole)
    assert len(metrics) == STEPS
    assert len({line["loss"] for line in metrics}) > STEPS // 2, "the run learns something at every step"
    done = 0
    while done < kills:
        run_dir = place / f"{kind} killed {done}"
        words = [*train(kind, place), "--run-dir", run_dir]
        for _ in range(min(rng.randint(1, MOST_IN_A_CHAIN), kills - done)):
            saved = max([int(path.name[5:]) for path in run_dir.glob("checkpoints/step-*")], default=0)
            first = min(saved + 1, STEPS - 1)
            moment = Moment(rng.randint(first, STEPS - 1), rng.randrange(CALLS_OF_A_STEP), signal.SIGSTOP)
            if not kill_at(words, moment, run_dir, place):
                break
            done += 1
            words = ["train", "--resume", run_dir]
        code, output = covey(*words, cwd=place) if words[1] == "--resume" else (0, "")
        assert code == 0, output
        assert_same_run(run_dir, whole)
        shutil.rmtree(run_dir)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_end_with_the_same_bits(kind: str, place: Path) -> None:
    kill_many_times(kind, 2, place)


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_ten_times_end_with_the_same_bits(kind: str, place: Path) -> None:
    kill_many_times(kind, 10, place)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_a_hundred_times_end_with_the_same_bits(kind: str, place: Path) -> None:
    kill_many_times(kind, 100, place)
