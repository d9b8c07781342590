"""An algorithm of the user's own: `covey.run(..., algorithm=...)`."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from covey.algorithms import Algorithm
from covey.algorithms.advantages import Advantages
from covey.config import CRITIC_FREE, ConfigError, ControlConfig, RunConfig
from covey.data import Batch, PolicyOutput
from covey.functional import with_loss_weights

READ_ELSEWHERE = ("mask_truncated", "credit")  # fields of [loss]: the first of RunConfig, the second of ControlConfig


def check_own(algorithm: Algorithm, config: RunConfig | ControlConfig, reward_names: Sequence[str] = ()) -> Algorithm:
    """The algorithm, which fits the config and works on a small batch.

    Args:
        algorithm: composed by the user.
        config: of the run. The rules about its field `algorithm` hold: groups, critic, and defaults of sampling.
        reward_names: of the run, as in `Batch.reward_names`.

    Raises:
        ConfigError: if it is not an algorithm, if fields of [loss] are set that it replaces, or if one of its functions
            raises an exception or returns something else than its type says.
    """
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm is of type {type(algorithm).__name__}: give a covey.algorithms.Algorithm, such as "
            "dataclasses.replace(grpo(), surrogate=...); a preset is named by the config's field algorithm"
        )
    base = config.algorithm
    if algorithm.needs_critic != (base not in CRITIC_FREE):
        has, other = ("a", "ppo") if algorithm.needs_critic else ("no", "grpo")
        raise ConfigError(
            f"the algorithm {algorithm.name!r} has {has} value loss, and the config's algorithm is {base!r}, whose "
            f"rules about the critic hold: set algorithm = {other!r} in the config"
        )
    for item in fields(config.loss):
        used = item.name == READ_ELSEWHERE[isinstance(config, ControlConfig)]
        if not used and getattr(config.loss, item.name) != item.default:
            raise ConfigError(
                f"loss.{item.name} is set, but algorithm= takes the place of [loss]: remove it, and compose "
                f"{algorithm.name!r} with it"
            )
    if config.replay.groups and algorithm.importance is None:
        raise ConfigError(
            f"replay.groups needs importance weights, and the algorithm {algorithm.name!r} has none: set its "
            "importance, such as covey.core.ratios.ImportanceWeights(cap=2.0)"
        )
    _try_out(algorithm, reward_names)
    return algorithm


def _try_out(algorithm: Algorithm, reward_names: Sequence[str]) -> None:
    """Advantages, loss and gradient of two groups of two rollouts."""
    batch = _batch(reward_names)
    logprobs_BT = batch.behavior_logprobs_BT.clone().requires_grad_()
    try:
        advantages = algorithm.advantage(batch)
        _check(isinstance(advantages, Advantages), "its advantage must return Advantages(advantages_BT)")
        _check_shape("its advantage", advantages.advantages_BT, batch)
        surrogate: Any = algorithm.surrogate(logprobs_BT, logprobs_BT - logprobs_BT.detach(), advantages.advantages_BT)
        _check(
            isinstance(surrogate, tuple) and len(surrogate) == len(("loss", "low", "high")),
            "its surrogate must return Surrogate(loss_BT, clipped_low_BT, clipped_high_BT), or "
            "Surrogate.unclipped(loss_BT)",
        )
        for tensor in surrogate:
            _check_shape("its surrogate", tensor, batch)
        if algorithm.needs_critic:
            _check_shape("its advantage, as the critic's targets,", advantages.returns_BT, batch)
        batch = with_loss_weights(algorithm, replace(batch, advantages_BT=advantages.advantages_BT))
        loss = algorithm.loss(PolicyOutput(logprobs_BT, -logprobs_BT), batch, 0.0).loss
        _check(loss.requires_grad, "its loss has no gradient: compute it from logprobs_BT or log_ratio_BT")
        loss.backward()
    except ConfigError as error:
        raise ConfigError(f"the algorithm {algorithm.name!r}, in a dry run on 4 rollouts: {error}") from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the algorithm {algorithm.name!r}, in a dry run on 4 rollouts: {type(error).__name__}"
            f"{f': {reason:.200}' if reason else ''} ({frame.filename}:{frame.lineno})"
        ) from error


def _batch(reward_names: Sequence[str]) -> Batch:
    mask_BT = torch.tensor([[True, True, True], [True, True, False], [True, False, True], [True, True, True]])
    rewards_BT = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.5, 0.0, 1.0]])
    reward_B = rewards_BT.sum(dim=1)
    return Batch.blank(
        mask_BT,
        behavior_logprobs_BT=torch.where(mask_BT, -torch.tensor([1.0, 0.5, 2.0]), 0.0),
        reward_B=reward_B,
        rewards_BT=rewards_BT,
        group_B=torch.tensor([0, 0, 1, 1]),
        step_end_BT=mask_BT,
        values_BT=torch.zeros(mask_BT.shape),
        bootstrap_value_B=torch.zeros(len(mask_BT)),
        reward_names=tuple(reward_names),
        reward_parts_BR=reward_B[:, None].repeat(1, len(reward_names)),
    )


def _check(true: bool, otherwise: str) -> None:
    if not true:
        raise ConfigError(otherwise)


def _check_shape(what: str, value: Any, batch: Batch) -> None:
    """Refuse a result that is not one finite number for each decision."""
    shape = tuple(batch.mask_BT.shape)
    _check(isinstance(value, torch.Tensor), f"{what} returned a {type(value).__name__} in place of a tensor {shape}")
    _check(value.shape == shape, f"{what} returned the shape {tuple(value.shape)} in place of {shape}")
    _check(bool(value[batch.mask_BT].isfinite().all()), f"{what} returned a value that is not finite")
