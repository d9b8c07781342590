"""Validate how the rollouts of a control run are made and compared: rollouts.kind, loss.credit and algorithm.

| rollouts.kind | algorithm | loss.credit |
|---|---|---|
| episodes | compares within groups | any; within_episode with groups of one |
| episodes | reinforce_pp, ppo | not used |
| branches | compares within groups | any but within_episode |
| branches | reinforce_pp | not used |
| fragments | ppo | not used |
"""

from __future__ import annotations

from covey.config.common import ConfigError
from covey.config.control import ControlConfig, EnvironmentConfig, RolloutsConfig
from covey.config.validate_collection import NOT_BY_GROUP, check_credit


def check_rollouts(config: ControlConfig) -> None:
    """Refuse combinations of rollouts.kind, loss.credit, algorithm and group size that compare nothing.

    Raises:
        ConfigError: one line that names the fields and the fix.
    """
    _check_kind(config.rollouts.kind, config.algorithm)
    check_credit(config.loss.credit, config.algorithm, "action")
    _check_within_episode(config.rollouts, config.loss.credit)
    _check_group_size(config.rollouts, config.loss.credit, config.algorithm)
    _check_vectorization(config.environment, config.rollouts.kind)


def _check_kind(kind: str, algorithm: str) -> None:
    if kind == "fragments" and algorithm != "ppo":
        raise ConfigError(
            f"rollouts.kind is 'fragments', but algorithm {algorithm!r} has no critic to value the rest of an episode: "
            "set kind to 'episodes', or algorithm to 'ppo'"
        )
    if algorithm == "ppo" and kind == "branches":
        raise ConfigError(
            "algorithm is 'ppo', but rollouts.kind is 'branches', and ppo does not compare siblings: set kind to "
            "'fragments', or algorithm to 'grpo'"
        )


def _check_within_episode(rollouts: RolloutsConfig, credit: str) -> None:
    if credit != "within_episode":
        return
    if rollouts.kind != "episodes":
        raise ConfigError(
            f"loss.credit is 'within_episode', but rollouts.kind is {rollouts.kind!r}, whose siblings it would not "
            "compare: set credit to 'outcome', or kind to 'episodes'"
        )
    if rollouts.group_size != 1:
        raise ConfigError(
            f"rollouts.group_size is {rollouts.group_size}, but loss.credit = 'within_episode' compares the decisions "
            "of one episode with each other: set group_size to 1 (and starts_per_step to the episodes of a step)"
        )


def _check_group_size(rollouts: RolloutsConfig, credit: str, algorithm: str) -> None:
    if rollouts.group_size == 1 and credit != "within_episode" and algorithm not in NOT_BY_GROUP:
        raise ConfigError(
            f"rollouts.group_size is 1, but loss.credit = {credit!r} compares the rollouts of a group with each other: "
            "set group_size to 2 or more"
        )


def _check_vectorization(environment: EnvironmentConfig, kind: str) -> None:
    if kind == "branches" and environment.vectorization not in ("auto", "sync"):
        raise ConfigError(
            f"environment.vectorization is {environment.vectorization!r}, but branches copy the environment's state, "
            "which needs the environment in this process; set it to 'auto' or 'sync'"
        )
