"""Validate the settings of process supervision."""

from __future__ import annotations

from covey.config import ConfigError, RewardConfig, RunConfig
from covey.config.builtin_rewards import step_rewards
from covey.config.fields import did_you_mean, or_list
from covey.config.function_source import check_function_name
from covey.config.validate_collection import check_credit

RULES = ("line", "paragraph", "sentence")


def check_process(config: RunConfig, *, other_rewards: bool = False) -> None:
    """Refuse contradictions between loss.credit, the rewards and [process].

    Args:
        other_rewards: [[rewards]] does not decide whether steps are used, because a script gives the rewards, or steps
            are labelled and not paid.

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    credit, boundary = config.loss.credit, config.process.boundary
    by_step = credit != "outcome"
    check_credit(credit, config.algorithm, "token")
    if boundary and boundary not in RULES:
        if ":" not in boundary:
            rules = ", ".join(RULES)
            raise ConfigError(
                f"process.boundary must be {rules} or file.py:function{did_you_mean(boundary, list(RULES))} "
                f"(is {boundary!r})"
            )
        check_function_name(boundary, "process.boundary")
    if other_rewards:
        return
    step_rewards = [reward for reward in config.rewards if reward.is_per_step]
    if by_step and not may_pay_steps(config):
        raise ConfigError((no_turn_reward if config.has_conversations else no_step_reward)(credit))
    if boundary and not (step_rewards or config.has_conversations):
        raise ConfigError("process.boundary is set, but no reward is paid by step: take it out, or add per_step = true")


def may_pay_steps(config: RunConfig) -> bool:
    """False if no reward is paid by reasoning step, or by turn of a conversation.

    Without [[rewards]], the environment of a conversation may pay, which is known when it is loaded.
    """
    if any(reward.is_per_step for reward in config.rewards):
        return True
    return config.has_conversations and (not config.rewards or any(reward.is_per_turn for reward in config.rewards))


def no_step_reward(credit: str) -> str:
    """Message for a run that compares reasoning steps although no reward is paid by step."""
    return (
        f"loss.credit is {credit!r}, but no reward is paid by step: add [[rewards]] with per_step = true and a "
        "function, or choose credit = 'outcome'"
    )


def no_turn_reward(credit: str) -> str:
    """Message for a run that compares the turns of conversations although no reward is paid by turn."""
    return (
        f"loss.credit is {credit!r}, but no reward is paid by turn: use an environment with step(message) and the "
        "reward environment, add [[rewards]] with per_step = true and a function, or choose credit = 'outcome'"
    )


def check_step_reward(reward: RewardConfig, where: str) -> None:
    """Refuse per_step for a reward of whole completions; `where` names the table in the message.

    Raises:
        ConfigError: if the reward is built in and pays whole completions.
    """
    if reward.per_step and reward.built_in is not None and not reward.built_in.per_step:
        raise ConfigError(
            f"{where} has per_step = true, but {reward.name} pays whole completions: name a function of your own, or "
            f"{or_list(step_rewards())}"
        )
