"""Every combination of rollouts.kind, loss.credit and algorithm trains, or one line refuses it and names the fix."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.config import ALGORITHM_NAMES, ConfigError, ControlConfig, ControlLossConfig, RolloutsConfig
from covey.config.recipe import describe_fields
from covey.experiment.control import CREDITS, ROLLOUT_KINDS, ControlBuilder
from covey.tracking.run_store import read_metrics
from helpers import toy_envs

COMPARED = {
    "episodes": ("outcome", "reward_to_go", "reward_to_go_by_step", "within_episode"),
    "branches": ("outcome", "reward_to_go", "reward_to_go_by_step"),
    "fragments": (),
}
NOT_COMPARED = {"reinforce_pp": ("episodes", "branches"), "ppo": ("episodes", "fragments")}
EVERY = list(product(ROLLOUT_KINDS, CREDITS, ALGORITHM_NAMES))


def goes_together(kind: str, credit: str, algorithm: str) -> bool:
    if algorithm in NOT_COMPARED:
        return kind in NOT_COMPARED[algorithm] and credit == "outcome"
    return credit in COMPARED[kind]


ALLOWED = [words for words in EVERY if goes_together(*words)]
REFUSED = [words for words in EVERY if not goes_together(*words)]


def tables(kind: str, credit: str, algorithm: str) -> dict[str, Any]:
    rollouts: dict[str, Any] = {"kind": kind}
    if kind == "fragments":
        rollouts |= {"environments": 3, "fragment_steps": 20}
    else:
        rollouts |= {"starts_per_step": 2, "group_size": 1 if credit == "within_episode" else 3}
    if kind == "branches":
        rollouts |= {"horizon": 40}
    return {
        "algorithm": algorithm,
        "steps": 2,
        "environment": {"id": "CartPole-v1"},
        "policy": {"hidden": [8]},
        "rollouts": rollouts,
        "loss": {"credit": credit, "entropy_coefficient": 0.01},
        "update": {"epochs": 1 if algorithm in ("rloo", "reinforce") else 2},
        "evaluation": {"episodes": 1},
    }


def test_the_tables_have_the_names_of_the_fields() -> None:
    kinds = RolloutsConfig.__dataclass_fields__["kind"].metadata["choices"]
    credits_ = ControlLossConfig.__dataclass_fields__["credit"].metadata["choices"]
    assert (tuple(ROLLOUT_KINDS), tuple(CREDITS)) == (kinds, credits_)
    assert len(ALLOWED) == 7 * (4 + 3) + 2 + 2


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("kind", "credit", "algorithm"), ALLOWED)
def test_an_allowed_combination_trains(kind: str, credit: str, algorithm: str, tmp_path: Path) -> None:
    parts = toy_envs.train_quietly(toy_envs.read(tables(kind, credit, algorithm)), tmp_path / "run")
    untrained = toy_envs.read(tables(kind, credit, algorithm) | {"steps": 1})
    shorter = toy_envs.train_quietly(untrained, tmp_path / "shorter")
    weights = [one.policy.module.network.linears[0].weight for one in (parts, shorter)]
    assert not torch.equal(*weights)
    metrics = read_metrics(tmp_path / "run")
    assert all(np.isfinite(value) for line in metrics for value in line.values())
    assert bool(parts.critics) == (algorithm == "ppo")
    assert metrics[0]["groups/zero_advantage_fraction"] < 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_the_discount_has_an_effect_in_every_algorithm(algorithm: str, tmp_path: Path) -> None:
    weights = []
    for gamma in (1.0, 0.5):
        config = toy_envs.read(tables("episodes", "outcome", algorithm), steps=1, rollouts={"gamma": gamma})
        parts = toy_envs.train_quietly(config, tmp_path / f"{gamma}")
        weights.append(parts.policy.module.network.linears[0].weight)
    assert not torch.equal(*weights)


@pytest.mark.parametrize(("kind", "credit", "algorithm"), REFUSED)
def test_any_other_combination_is_refused(kind: str, credit: str, algorithm: str) -> None:
    with pytest.raises(ConfigError) as caught:
        toy_envs.read(tables(kind, credit, algorithm))
    said = str(caught.value)
    assert "\n" not in said
    assert any(said.startswith(field) for field in ("rollouts.kind is", "loss.credit is", "algorithm is"))
    assert "set " in said or "remove it, or choose" in said


@pytest.mark.parametrize(
    ("kind", "credit", "algorithm", "expected"),
    [
        ("fragments", "outcome", "grpo", "set kind to 'episodes', or algorithm to 'ppo'"),
        ("branches", "outcome", "ppo", "set kind to 'fragments', or algorithm to 'grpo'"),
        ("fragments", "reward_to_go", "ppo", "loss.credit is set, but not used with ppo: remove it, or choose grpo"),
        (
            "episodes",
            "within_episode",
            "reinforce_pp",
            "loss.credit is set, but not used with reinforce_pp: remove it, or choose grpo",
        ),
        ("branches", "within_episode", "rloo", "set credit to 'outcome', or kind to 'episodes'"),
    ],
)
def test_the_refusals_name_the_fix(kind: str, credit: str, algorithm: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("(", r"\(")):
        toy_envs.read(tables(kind, credit, algorithm))


@pytest.mark.parametrize(
    ("kind", "credit", "algorithm", "expected"),
    [
        ("episodes", "reward_to_go", "grpo", "2 steps of 2 starts x 3 episodes (reward_to_go)"),
        ("episodes", "within_episode", "grpo", "2 steps of 2 starts x 1 episode (within_episode)"),
        ("branches", "outcome", "rloo", "2 steps of 2 starts x 3 branches (outcome)"),
        ("fragments", "outcome", "ppo", "2 steps of 3 environments x 20 steps"),
        ("episodes", "outcome", "ppo", "2 steps of 2 starts x 3 episodes"),
    ],
)
def test_a_run_says_what_a_step_holds(kind: str, credit: str, algorithm: str, expected: str) -> None:
    world = ControlBuilder(toy_envs.read(tables(kind, credit, algorithm)))
    try:
        assert world.describe() == f"{algorithm} on CartPole-v1, {expected}"
    finally:
        world.close()


def test_branches_by_decision_use_the_whole_branch(tmp_path: Path) -> None:
    """Of outcomes the first action alone; the same branches either way."""
    sampled = {}
    for credit in ("outcome", "reward_to_go", "reward_to_go_by_step"):
        config = toy_envs.read(tables("branches", credit, "grpo"), steps=1, rollouts={"horizon": 6})
        toy_envs.train_quietly(config, tmp_path / credit)
        (sampled[credit],) = read_metrics(tmp_path / credit)
    assert sampled["outcome"]["decisions/sampled"] == 6
    for credit in ("reward_to_go", "reward_to_go_by_step"):
        assert sampled[credit]["decisions/sampled"] == 36
        assert sampled[credit]["environment/steps"] == sampled["outcome"]["environment/steps"]
        assert sampled[credit]["reward/mean"] == sampled["outcome"]["reward/mean"]


def test_the_help_explains_every_choice() -> None:
    texts = {row.name: row.text for row in describe_fields(ControlConfig)}
    assert all(f"({kind}" in texts["kind"] for kind in ROLLOUT_KINDS)
    assert all(f"({credit})" in texts["credit"] for credit in CREDITS)
