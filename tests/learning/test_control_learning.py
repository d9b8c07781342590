"""Agents learn what their environment pays for, in seconds, and the opposite where the pay is negated."""

from pathlib import Path
from typing import Any

import pytest

from helpers import toy_envs
from helpers.cases import slow_unless

CARTPOLE: dict[str, dict[str, Any]] = {
    "episodes": {
        "algorithm": "grpo",
        "steps": 14,
        "rollouts": {"kind": "episodes", "starts_per_step": 4, "group_size": 8},
        "update": {"learning_rate": 0.005},
    },
    "reward_to_go_by_step": {
        "algorithm": "rloo",
        "steps": 28,
        "rollouts": {"starts_per_step": 4, "group_size": 8},
        "loss": {"credit": "reward_to_go_by_step"},
        "update": {"learning_rate": 0.005, "epochs": 1},
    },
    "within_episode": {
        "algorithm": "grpo",
        "steps": 25,
        "rollouts": {"starts_per_step": 16, "group_size": 1},
        "loss": {"credit": "within_episode"},
        "update": {"learning_rate": 0.005},
    },
    "branches": {
        "algorithm": "grpo",
        "steps": 30,
        "rollouts": {"kind": "branches", "starts_per_step": 16, "group_size": 8, "horizon": 30},
        "update": {"learning_rate": 0.01},
    },
    "branches_by_step": {
        "algorithm": "grpo",
        "steps": 20,
        "rollouts": {"kind": "branches", "starts_per_step": 16, "group_size": 8, "horizon": 30},
        "loss": {"credit": "reward_to_go_by_step"},
        "update": {"learning_rate": 0.01},
    },
    "ppo_on_episodes": {
        "algorithm": "ppo",
        "steps": 20,
        "rollouts": {"kind": "episodes", "starts_per_step": 4, "group_size": 4},
        "update": {"learning_rate": 0.005},
    },
    "fragments": {
        "algorithm": "ppo",
        "steps": 60,
        "rollouts": {"kind": "fragments", "environments": 8, "fragment_steps": 32, "gamma": 0.98},
        "loss": {"gae_lambda": 0.8},
        "update": {"learning_rate": 0.002, "epochs": 10},
    },
}
TARGETS: dict[str, dict[str, Any]] = {
    "reward_to_go_by_step": {
        "algorithm": "grpo",
        "steps": 20,
        "rollouts": {"starts_per_step": 8, "group_size": 8, "gamma": 0.0},
        "loss": {"credit": "reward_to_go_by_step"},
        "update": {"learning_rate": 0.01},
    },
    "fragments": {
        "algorithm": "ppo",
        "steps": 20,
        "policy": {"normalise_observations": True},
        "rollouts": {"kind": "fragments", "environments": 8, "fragment_steps": 40, "gamma": 0.0},
        "update": {"learning_rate": 0.01},
    },
}


QUICK = ("episodes", "ppo_on_episodes")


@pytest.fixture(autouse=True)
def _registered() -> None:
    toy_envs.register()


def learnt(tables: dict[str, Any], name: str, run_dir: Path, measured_on: str) -> float:
    """Mean return on `measured_on` of an agent trained on `name`."""
    config = toy_envs.read(tables, environment={"id": name}, seed=2)
    return toy_envs.mean_return(toy_envs.train_quietly(config, run_dir).policy, measured_on)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", slow_unless(QUICK, CARTPOLE))
def test_the_pole_stays_up(name: str, tmp_path: Path) -> None:
    """Untrained greedy agents hold it for 9 to 30 steps, random ones for 22."""
    assert learnt(CARTPOLE[name], "CartPole-v1", tmp_path / "run", "CartPole-v1") > 120


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", slow_unless(QUICK, CARTPOLE))
def test_the_pole_falls_where_that_is_paid_for(name: str, tmp_path: Path) -> None:
    assert learnt(CARTPOLE[name], toy_envs.NEGATED_CARTPOLE, tmp_path / "run", "CartPole-v1") < 12


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_continuous_actions_find_their_target(name: str, tmp_path: Path) -> None:
    """Naming 0 earns -3.3 an episode."""
    assert learnt(TARGETS[name], toy_envs.TARGET, tmp_path / "run", toy_envs.TARGET) > -0.7


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TARGETS)
def test_continuous_actions_flee_where_that_is_paid_for(name: str, tmp_path: Path) -> None:
    assert learnt(TARGETS[name], toy_envs.NEGATED_TARGET, tmp_path / "run", toy_envs.TARGET) < -10
