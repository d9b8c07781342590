"""Rules of a [[rewards]] table with a reward model."""

from __future__ import annotations

from covey.config.common import ConfigError
from covey.config.reward_models import reward_model_fault
from covey.config.rewards import RewardConfig

OPTIONS = ("standardise", "clip", "step_differences", "aggregate")


def check_reward_model(reward: RewardConfig, where: str) -> None:
    """Refuse a reward model that cannot be found or used, and options of reward models for other rewards.

    Args:
        where: names the table in the message.

    Raises:
        ConfigError: one line that names the fix.
    """
    if not reward.model:
        unused = next((name for name in OPTIONS if getattr(reward, name) not in (None, False, "")), "")
        if unused:
            raise ConfigError(f"{where} has {unused}, which only reward models use: take it out, or name a model")
        return
    try:
        fault = reward_model_fault(reward.model, per_step=reward.per_step)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if fault:
        raise ConfigError(f"{where}: {fault}")
    if reward.step_differences and not reward.per_step:
        raise ConfigError(f"{where} has step_differences = true without per_step: add per_step = true")
    if reward.aggregate and reward.per_step:
        raise ConfigError(
            f"{where} has aggregate and per_step = true, which gives every step its own score: take one out"
        )
