"""Validate the settings of rollout replay."""

from __future__ import annotations

from covey.config.common import ConfigError
from covey.config.control import ControlConfig
from covey.config.llm import RunConfig
from covey.config.replay import ReplayConfig
from covey.config.validate_collection import NOT_BY_GROUP

KL_IN_REWARD = ("rloo",)  # algorithms that compare within groups and have a KL in the reward by default


def check_replay(config: RunConfig | ControlConfig) -> None:
    """Refuse settings of [replay] that have no effect, and runs whose rollouts cannot be learnt from again.

    Raises:
        ConfigError: naming the field and the fix.
    """
    replay, default = config.replay, ReplayConfig()
    if not replay.groups:
        for name in ("max_age", "max_uses"):
            if getattr(replay, name) != getattr(default, name):
                raise ConfigError(f"replay.{name} is set, but replay.groups is 0, so nothing is replayed: set it too")
        return
    if reason := why_not(config):
        raise ConfigError(f"replay.groups is set, but {reason}")


def why_not(config: RunConfig | ControlConfig) -> str:
    """Why rollouts of this run cannot be learnt from again, with the fix; empty if they can."""
    if config.algorithm in NOT_BY_GROUP:
        return (
            f"{config.algorithm} does not compare within groups, so the advantages of a rollout are those of the step "
            "that sampled it: take it out, or choose grpo"
        )
    if _has_kl_in_reward(config):
        return (
            "the KL is in the reward, where it is that of the policy which sampled: set loss.kl_coefficient to 0, or "
            "loss.kl_estimator to 'k3'"
        )
    if config.loss.clip_cov_fraction or config.loss.kl_cov_fraction:
        return (
            "Clip-Cov and KL-Cov compare decisions of one policy, and earlier groups are of others: set "
            "loss.clip_cov_fraction and loss.kl_cov_fraction to 0, or replay.groups"
        )
    if isinstance(config, RunConfig) and config.iteration.steps:
        return (
            "iteration.steps trains the reward model, so earlier groups have the rewards of another one: take one of "
            "them out"
        )
    return ""


def _has_kl_in_reward(config: RunConfig | ControlConfig) -> bool:
    loss = config.loss
    estimator = loss.kl_estimator or ("k1" if config.algorithm in KL_IN_REWARD else "k3")
    return estimator == "k1" and loss.kl_to == "reference" and loss.kl_coefficient != 0
