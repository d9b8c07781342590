"""Rules of the [iteration] table: iterative GRPO."""

from __future__ import annotations

from dataclasses import fields

from covey.config.common import ConfigError
from covey.config.llm import IterationConfig, RunConfig

VERIFIER = 'a [[rewards]] table with name = "numeric", weight = 0.0 and score = true, or your own with binary = true'


def check_iteration(config: RunConfig, *, own_rewards: bool) -> None:
    """Refuse an iterative run that cannot work, and fields of [iteration] in any other run.

    Args:
        own_rewards: a script gives the rewards, which `covey.experiment.iteration` checks.

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    iteration = config.iteration
    if not iteration.steps:
        if iteration != IterationConfig():
            changed = next(item.name for item in fields(iteration) if getattr(iteration, item.name) != item.default)
            raise ConfigError(
                f"iteration.{changed} is set, but iteration.steps is not, so no reward model is trained: set "
                "iteration.steps to the number of training steps of an iteration, or take the table out"
            )
        return
    if config.steps % iteration.steps:
        nearest = max(1, round(config.steps / iteration.steps)) * iteration.steps
        raise ConfigError(
            f"steps ({config.steps}) is no multiple of iteration.steps ({iteration.steps}), so the last iteration "
            f"would be cut short: set steps to {nearest}"
        )
    if config.reference.refresh_every:
        raise ConfigError(
            "reference.refresh_every is set, but an iterative run copies the policy into the reference at the end of "
            "each iteration: take it out"
        )
    if not own_rewards:
        _check_iteration_rewards(config)


def _check_iteration_rewards(config: RunConfig) -> None:
    """Refuse an iterative run without exactly one reward model, or without a verifier."""
    models = [reward for reward in config.rewards if reward.model]
    if len(models) != 1:
        many = "are several" if models else "is none"
        raise ConfigError(
            f"iteration.steps is set, but an iterative run trains one reward model, and there {many}: give one "
            '[[rewards]] table model = "FOLDER"'
        )
    scored = next((reward for reward in config.rewards if reward.score), config.rewards[0])
    if not scored.is_binary:
        raise ConfigError(
            "iteration.steps is set, but an iterative run labels completions with a verifier, the reward with score = "
            f"true, which must be 1 for right and 0 for wrong: add {VERIFIER}"
        )
