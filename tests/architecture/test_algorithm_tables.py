"""The strings about algorithms in `covey.config`, which may not import torch, agree with the algorithms themselves."""

import inspect
from dataclasses import replace

import pytest
import torch

from covey.algorithms import ALGORITHMS, Algorithm
from covey.config import (
    ALGORITHM_NAMES,
    CRITIC_FREE,
    ConfigError,
    ControlConfig,
    EnvironmentConfig,
    RolloutsConfig,
    RunConfig,
)
from covey.config.common import NOT_BY_GROUP, WITHOUT_RATIO
from covey.config.fields import iter_fields
from covey.config.rules import validate
from covey.data import Batch

PARAMETERS = {name: set(inspect.signature(build).parameters) for name, build in ALGORITHMS.items()}
USED_BY = {
    where: set(item.metadata["used_by"])
    for config in (RunConfig(), ControlConfig())
    for where, item, *_ in iter_fields(config)
    if item.metadata["used_by"]
}
FIELD_OF = {"lam": "loss.gae_lambda"}  # parameters of a builder that the config names otherwise


def built(name: str) -> Algorithm:
    return ALGORITHMS[name](**({"max_length": 3} if "max_length" in PARAMETERS[name] else {}))


def compares_within_groups(algorithm: Algorithm) -> bool:
    """Whether the advantages depend on which rollouts form a group."""
    rewards_BT = torch.tensor([[1.0, 5.0], [2.0, 3.0], [7.0, 11.0], [4.0, 6.0]])
    batch = Batch.blank(
        torch.ones(4, 2, dtype=torch.bool),
        rewards_BT=rewards_BT,
        reward_B=rewards_BT.sum(dim=1),
        values_BT=torch.zeros(4, 2),
        bootstrap_value_B=torch.zeros(4),
    )
    first, second = (
        algorithm.advantage(replace(batch, group_B=torch.tensor(group_B))).advantages_BT
        for group_B in ([0, 0, 1, 1], [0, 1, 0, 1])
    )
    return not torch.equal(first, second)


def uses_the_ratio(algorithm: Algorithm) -> bool:
    """Whether the surrogate depends on how far the policy has moved."""
    one_BT = torch.ones(1, 1)
    losses = [algorithm.surrogate(-one_BT, log_ratio * one_BT, one_BT).loss_BT for log_ratio in (0.0, 0.1)]
    return not torch.equal(*losses)


def test_every_algorithm_has_its_name_in_the_config() -> None:
    assert set(ALGORITHM_NAMES) == set(ALGORITHMS)
    assert len(ALGORITHM_NAMES) == len(set(ALGORITHM_NAMES))


def test_algorithms_without_a_critic() -> None:
    assert set(CRITIC_FREE) == {name for name in ALGORITHMS if built(name).value_loss is None}


def test_algorithms_that_do_not_compare_within_groups() -> None:
    assert set(NOT_BY_GROUP) == {name for name in ALGORITHMS if not compares_within_groups(built(name))}
    assert set(NOT_BY_GROUP) == {name for name in ALGORITHMS if "credit" not in PARAMETERS[name]}


def test_algorithms_without_a_ratio() -> None:
    assert set(WITHOUT_RATIO) == {name for name in ALGORITHMS if not uses_the_ratio(built(name))}
    assert set(WITHOUT_RATIO) <= {name for name in ALGORITHMS if "clip_low" not in PARAMETERS[name]}


def test_fields_that_one_algorithm_uses() -> None:
    """Those of a critic, and those that only the builder of the algorithm with a critic takes."""
    (with_critic,) = set(ALGORITHM_NAMES) - set(CRITIC_FREE)
    others = set().union(*(PARAMETERS[name] for name in CRITIC_FREE))
    taken = {FIELD_OF.get(name, f"loss.{name}") for name in PARAMETERS[with_critic] - others}
    assert USED_BY["loss.gamma"] == {name for name in ALGORITHM_NAMES if "gamma" in PARAMETERS[name]}
    every = {where for config in (RunConfig(), ControlConfig()) for where, *_ in iter_fields(config)}
    of_critic = {where for where in every if "critic" in where}
    assert {where for where, users in USED_BY.items() if users == {with_critic}} == taken | of_critic
    assert of_critic


def test_fields_that_some_algorithms_or_kinds_of_rollouts_use() -> None:
    kinds = set(RolloutsConfig.__dataclass_fields__["kind"].metadata["choices"])
    assert all(users < kinds or users < set(ALGORITHM_NAMES) for users in USED_BY.values())
    assert {users <= kinds for users in USED_BY.values()} == {True, False}


def accepts_fragments(algorithm: str) -> bool:
    config = ControlConfig(
        algorithm=algorithm, environment=EnvironmentConfig("CartPole-v1"), rollouts=RolloutsConfig(kind="fragments")
    )
    try:
        validate(config)
    except ConfigError:
        return False
    return True


def test_fragments_go_with_algorithms_that_have_a_critic() -> None:
    assert {name for name in ALGORITHM_NAMES if accepts_fragments(name)} == set(ALGORITHM_NAMES) - set(CRITIC_FREE)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_checks_can_fail(name: str) -> None:
    """Each answers yes for one algorithm and no for another."""
    assert compares_within_groups(built(name)) == (name == "grpo")
    assert uses_the_ratio(built(name)) != uses_the_ratio(built("rloo"))
