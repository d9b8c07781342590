"""Runs of every kind, killed at random moments and resumed: the same bits, and the lock in force until the kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.config.recipe_writing import write_config
from helpers import toy_envs
from helpers.cases import slow_unless
from helpers.kills import Kills, anywhere
from helpers.run_helpers import reproducible_metrics, write_recipe
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
KINDS: dict[str, Any] = {
    "GRPO": [],
    "PPO with a critic": ["--algorithm", "ppo", "--critic-warmup-steps", "2", "--critic-epochs", "1"],
    "CartPole groups": {"rollouts": {"starts_per_step": 4, "group_size": 4}},
    "CartPole fragments": {"algorithm": "ppo", "rollouts": FRAGMENTS, "update": {"minibatches": 2, "critic_epochs": 2}},
}
ADAPTERS = {
    "GRPO with an adapter": ["--rank", "2", "--refresh-every", "2", "--precision", "bf16"],
    "PPO with adapters": ["--rank", "2", "--algorithm", "ppo", "--trunk", "adapter", "--critic-warmup-steps", "2"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


def train(kind: str, place: Path) -> list[object]:
    """The words of a new run of this kind."""
    more = (KINDS | ADAPTERS)[kind]
    recipe = place / f"{kind}.toml"
    if isinstance(more, dict):
        if not recipe.exists():
            write_config(toy_envs.read(CONTROL, **more), recipe)
        return ["train", recipe]
    if not recipe.exists():
        write_recipe(place, tiny_folder(place / "model"), STEPS).rename(recipe)
    return ["train", recipe, *more]


def kill_many_times(kind: str, kills: int, place: Path) -> None:
    runs = Kills(kind, train(kind, place), STEPS, place)
    metrics = reproducible_metrics(runs.whole)
    assert len(metrics) == STEPS
    assert len({line["loss"] for line in metrics}) > STEPS // 2, "the run learns something at every step"
    runs.kill([anywhere] * kills)


@pytest.mark.parametrize("kind", slow_unless(["GRPO"], KINDS))
def test_killed_runs_end_with_the_same_bits(kind: str, place: Path) -> None:
    kill_many_times(kind, 2, place)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_ten_times_end_with_the_same_bits(kind: str, place: Path) -> None:
    kill_many_times(kind, 10, place)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_runs_with_adapters_killed_ten_times_end_with_the_same_bits(kind: str, place: Path) -> None:
    kill_many_times(kind, 10, place)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_a_hundred_times_end_with_the_same_bits(kind: str, place: Path) -> None:
    kill_many_times(kind, 100, place)
