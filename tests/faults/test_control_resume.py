"""A run on an environment that is killed and resumed ends with the same bits as one that was never stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main
from covey.config.reader import write_config
from helpers import practice
from helpers.runs import files, reproducible_metrics

STEPS = 40
FRAGMENTS = {"groups": "fragments", "environments": 6, "fragment_steps": 60, "reward_scaling": "running_std"}
COMMON = {
    "steps": STEPS,
    "seed": 3,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 150},
    "update": {"learning_rate": 0.0003, "schedule": "linear"},
    "evaluation": {"episodes": 4, "every": 7},
    "checkpoint": {"every": 3},
}
RUNS: dict[str, dict[str, Any]] = {
    "episodes": {"rollouts": {"starts_per_step": 4, "group_size": 4}, "policy": {"normalise_observations": True}},
    "reward_to_go": {
        "algorithm": "rloo",
        "rollouts": {"groups": "reward_to_go", "starts_per_step": 4, "group_size": 4, "environments": 5},
        "loss": {"kl_coefficient": 0.01},
        "update": {"epochs": 1},
    },
    "branches": {
        "rollouts": {
            "groups": "branches",
            "starts_per_step": 6,
            "group_size": 4,
            "horizon": 20,
            "reward_scaling": "running_std",
        },
        "policy": {"normalise_observations": True},
    },
    "fragments": {
        "algorithm": "ppo",
        "rollouts": FRAGMENTS,
        "policy": {"normalise_observations": True},
        "update": {"learning_rate": 0.002, "minibatches": 2, "critic_epochs": 2, "target_kl": 0.05},
    },
    "continuous": {
        "algorithm": "ppo",
        "environment": {"id": "Pendulum-v1"},
        "rollouts": FRAGMENTS | {"environments": 3, "fragment_steps": 47},
        "policy": {"normalise_observations": True, "hidden": [16]},
        "update": {"learning_rate": 0.002, "critic_learning_rate": 0.01},
    },
}


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Fresh processes in which torch is already imported: a command takes a second instead of ten."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["covey.recipes.run", "covey.recipes.control"])
    yield context
    if before is None:
        del os.environ["OMP_NUM_THREADS"]


def covey(processes: Any, *words: object) -> Any:
    """The command with these words, in a process of its own; its exit code is that of `command`."""
    process = processes.Process(target=command, args=([str(word) for word in words],))
    process.start()
    return process


def command(words: list[str]) -> None:
    raise SystemExit(main(words))


def write_recipe(folder: Path, name: str) -> Path:
    recipe = folder / f"{name}.toml"
    write_config(practice.read(COMMON, **RUNS[name]), recipe)
    return recipe


def wait_for_steps(run_dir: Path, count: int, process: Any) -> None:
    """Until a run has recorded so many steps."""
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert process.is_alive(), "it ended before it was to be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def reproducible_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json without its clocks, its memory and its own place."""
    summary = json.loads((run_dir / "summary.json").read_text())
    for name in ("seconds", "peak_memory_bytes", "run_dir"):
        del summary[name]
    for evaluation in summary["evaluations"]:
        for moment in ("before", "after"):
            del evaluation[moment]["seconds"]
    return summary


@pytest.mark.parametrize("name", RUNS)
def test_sigkill_and_resume_end_with_the_same_bits(name: str, processes: Any, tmp_path: Path) -> None:
    rng = random.Random(name)
    recipe = write_recipe(tmp_path, name)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = covey(processes, "train", recipe, "--run-dir", killed)
    kills = 0
    for after in sorted(rng.sample(range(1, STEPS * 2 // 3), 2)):
        wait_for_steps(killed, after, process)
        time.sleep(rng.random() * 0.05)  # anywhere in a step: sampling, updating, writing a checkpoint
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        process = covey(processes, "train", "--resume", killed)
    uninterrupted = covey(processes, "train", recipe, "--run-dir", whole)
    for ended in (process, uninterrupted):
        ended.join(120)
        assert ended.exitcode == 0
    assert kills
    metrics = reproducible_metrics(whole)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert len({line["loss"] for line in metrics}) > STEPS // 2, "the run learns something at every step"
    assert reproducible_metrics(killed) == metrics
    assert files(killed / "model") == files(whole / "model")
    assert files(killed / "rollouts") == files(whole / "rollouts")
    last = f"checkpoints/step-{STEPS:08d}"
    for part in ("tensors.safetensors", "state.json"):
        assert (killed / last / part).read_bytes() == (whole / last / part).read_bytes()
    assert reproducible_summary(killed) == reproducible_summary(whole)
