"""A run on an environment that is killed and resumed ends with the same bits as one that was never stopped."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from covey.config.recipe_writing import write_config
from helpers import toy_envs
from helpers.run_helpers import CALLS_OF_A_STEP, Moment, covey, files, reproducible_metrics

STEPS = 40
FRAGMENTS = {"kind": "fragments", "environments": 6, "fragment_steps": 60, "reward_scaling": "running_std"}
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
    "replay": {
        "rollouts": {"starts_per_step": 2, "group_size": 4},
        "policy": {"normalise_observations": True},
        "replay": {"groups": 2},
    },
    "reward_to_go": {
        "algorithm": "rloo",
        "rollouts": {"starts_per_step": 4, "group_size": 4, "environments": 5},
        "loss": {"credit": "reward_to_go_by_step", "kl_coefficient": 0.01},
        "update": {"epochs": 1},
    },
    "branches": {
        "rollouts": {
            "kind": "branches",
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
    "entropy": {
        "algorithm": "ppo",
        "rollouts": FRAGMENTS,
        "loss": {
            "entropy_target": 0.6,
            "entropy_controller": "clip",
            "clip_cov_fraction": 0.05,
            "clip_cov_bounds": [0.1, 9.0],
            "kl_cov_fraction": 0.05,
        },
        "update": {"learning_rate": 0.002, "minibatches": 2},
    },
    "continuous": {
        "algorithm": "ppo",
        "environment": {"id": "Pendulum-v1"},
        "rollouts": FRAGMENTS | {"environments": 3, "fragment_steps": 47},
        "policy": {"normalise_observations": True, "hidden": [16]},
        "update": {"learning_rate": 0.002, "critic_learning_rate": 0.01},
    },
}


def write_recipe(folder: Path, name: str) -> Path:
    recipe = folder / f"{name}.toml"
    write_config(toy_envs.read(COMMON, **RUNS[name]), recipe)
    return recipe


def reproducible_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json without its clocks, its memory and its own place."""
    summary = json.loads((run_dir / "summary.json").read_text())
    for name in ("seconds", "peak_memory_bytes", "run_dir"):
        del summary[name]
    for evaluation in summary["evaluations"]:
        for moment in ("before", "after"):
            del evaluation[moment]["seconds"]
    return summary


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["episodes", "replay", "branches", "entropy", "continuous", "reward_to_go", "fragments"]
)
def test_sigkill_and_resume_end_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Anywhere in a step: sampling, updating, writing a checkpoint."""
    rng = random.Random(name)
    recipe = write_recipe(tmp_path, name)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words: tuple[object, ...] = "train", recipe, "--run-dir", killed
    for step in sorted(rng.sample(range(1, STEPS * 2 // 3), 2)):
        code, output = covey(*words, cwd=tmp_path, moment=Moment(step, rng.randrange(CALLS_OF_A_STEP)))
        assert code == -signal.SIGKILL, output
        words = "train", "--resume", killed
    for last in (words, ("train", recipe, "--run-dir", whole)):
        code, output = covey(*last, cwd=tmp_path)
        assert code == 0, output
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
