"""The algorithm of a run, from its config or of the user's own (`covey.run(..., algorithm=...)`), and its learners."""

import inspect
import math
import traceback
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from covey.algorithms import (
    ALGORITHMS,
    Algorithm,
    HighCovariance,
    KLEstimator,
    KLInLoss,
    KLInReward,
    KLPenalty,
    KLPlacement,
    KLToBehavior,
    default_kl,
)
from covey.algorithms.advantages import Advantages
from covey.config import CRITIC_FREE, ConfigError, ControlConfig, LossBase, RunBase, RunConfig, UpdateBase
from covey.config.common import last_restart
from covey.core import kl, ratios, schedules
from covey.data import Batch, Critic, Policy, PolicyOutput, Team
from covey.functional import with_loss_weights
from covey.runtime.distributed import ALONE, WHOLE, Weights
from covey.runtime.optimizer import MasterAdamW, learning_rate_schedule
from covey.train.learners import (
    NO_ENTROPY_CONTROL,
    BonusControl,
    ClipControl,
    Coefficient,
    CriticLearner,
    EntropyControl,
    Learner,
    PolicyLearner,
    UpdatePlan,
    actor_critic,
)
from covey.train.pace import Pace, TimeBudget

KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "exact": kl.exact}
OF_LOSS = ("entropy_coefficient", "whiten", "value_coefficient", "value_clip")  # arguments with the name of a field
READ_ELSEWHERE = ("mask_truncated", "credit")  # fields of [loss]: the first of RunConfig, the second of ControlConfig


def build_algorithm(name: str, loss: LossBase, **options: Any) -> Algorithm:
    """Build an algorithm by its name, with the fields of [loss] that are set.

    Args:
        name: a key of `ALGORITHMS`.
        loss: the [loss] table of either kind of run.
        options: arguments that [loss] does not have; those that the algorithm's function does not take are ignored.

    Raises:
        ConfigError: if a clip range is set and the algorithm does not clip.
    """
    build = ALGORITHMS[name]
    parameters = inspect.signature(build).parameters
    default = default_kl(name)
    coefficient = default.coefficient(1) if loss.kl_coefficient is None else loss.kl_coefficient
    estimator = KL_ESTIMATORS[loss.kl_estimator] if loss.kl_estimator else default.placement.estimator
    schedule = schedules.constant(coefficient, warmup_steps=loss.kl_warmup_steps)
    penalty = KLPenalty(schedule, _kl_placement(loss.kl_to, estimator))
    options |= {field: getattr(loss, field) for field in OF_LOSS} | {"lam": loss.gae_lambda}
    chosen = {name: value for name, value in options.items() if name in parameters}
    for field in ("clip_low", "clip_high", "dual_clip"):
        value = getattr(loss, field)
        if value is not None:
            if field not in parameters:
                raise ConfigError(f"algorithm {name!r} does not clip: leave out loss.{field}")
            chosen[field] = value
    low, high = loss.clip_cov_bounds
    covariance = HighCovariance(loss.clip_cov_fraction, (low, high), loss.kl_cov_fraction, loss.kl_cov_coefficient)
    return replace(build(kl=penalty, **chosen), importance=_importance_weights(loss), high_covariance=covariance)


def _importance_weights(loss: LossBase) -> ratios.ImportanceWeights | None:
    if loss.importance_cap is None and not loss.importance_mask:
        return None
    low, high = loss.importance_mask or (0.0, math.inf)
    cap = math.inf if loss.importance_cap is None else loss.importance_cap
    of_token = loss.importance_level == "token"
    log_ratio = ratios.token_log_ratio if of_token else ratios.sequence_product_log_ratio
    return ratios.ImportanceWeights(cap, low, high, log_ratio)


def _kl_placement(to: str, estimator: KLEstimator) -> KLPlacement:
    if to == "behavior":
        return KLToBehavior(estimator)
    # To the reference, k1 acts only in the reward: in the loss the expectation of its gradient is zero. The others act
    # only in the loss: in the reward the two halves of k3 cancel.
    return KLInReward() if estimator is kl.k1 else KLInLoss(estimator)


def build_kl_coefficient(penalty: KLPenalty, loss: LossBase) -> Coefficient:
    """The KL coefficient of every step: adaptive after the warm-up if there is a target, otherwise scheduled."""
    if loss.adaptive_kl_target is None:
        return Coefficient(penalty.coefficient)
    target, horizon = loss.adaptive_kl_target, loss.adaptive_kl_horizon

    def rule(coefficient: float, measured: float, rollouts: int) -> float:
        return schedules.adaptive_kl_coefficient(
            coefficient, measured, target=target, horizon=horizon, rollouts=rollouts
        )

    first_step = max(1, loss.kl_warmup_steps)
    return Coefficient(penalty.coefficient, penalty.placement.metric, rule, first_step=first_step)


def build_entropy_control(name: str, loss: LossBase) -> EntropyControl:
    """The controller of the entropy if there is a target.

    Args:
        name: of the algorithm, a key of `ALGORITHMS`.
        loss: the [loss] table of either kind of run.
    """
    if loss.entropy_target is None:
        return NO_ENTROPY_CONTROL
    target, gain = loss.entropy_target, loss.entropy_gain
    by_bonus = loss.entropy_controller == "bonus"
    low, high = (factor * (loss.entropy_coefficient if by_bonus else 1.0) for factor in loss.entropy_factors)

    def rule(value: float, measured: float, rollouts: int) -> float:
        return schedules.adaptive_entropy_value(value, measured, target=target, gain=gain, low=low, high=high)

    if by_bonus:
        return BonusControl(rule, coefficient=loss.entropy_coefficient)
    parameters = inspect.signature(ALGORITHMS[name]).parameters
    given = {field: getattr(loss, field) for field in ("clip_low", "clip_high")}
    return ClipControl(
        rule, **{field: parameters[field].default if value is None else value for field, value in given.items()}
    )


def build_learners(
    config: RunConfig | ControlConfig,
    algorithm: Algorithm,
    policy: Policy,
    kl_coefficient: Coefficient,
    modules: Sequence[tuple[nn.Module, Weights]],
    critics: Sequence[Critic] = (),
    *,
    single_decisions: bool = False,
    shared_trunk: bool = False,
    team: Team = ALONE,
    pace: Pace,
) -> tuple[Learner, ...]:
    """The learners of a run, with their optimizers and learning rates.

    Args:
        config: with the name of the algorithm and the tables [update] and [loss].
        algorithm: defines the losses.
        policy: the policy to train.
        kl_coefficient: of the KL penalty.
        modules: the trainable modules of the policy and of the critic, if there is one, each with the division of its
            weights among the ranks.
        critics: the critic, if there is one.
        single_decisions: if True, a minibatch may have a part of a rollout.
        shared_trunk: if True, the critic's value head is on the policy's trunk.
        team: the ranks, whose gradients are added.
        pace: of the learning rates.
    """
    update = config.update
    plan = UpdatePlan(
        update.epochs,
        update.minibatches,
        single_decisions=single_decisions,
        target_kl=math.inf if update.target_kl is None else update.target_kl,
        critic_epochs=update.critic_epochs,
        critic_warmup_steps=update.critic_warmup_steps,
    )
    rates = [
        pace.over(
            learning_rate_schedule(
                update.schedule,
                peak,
                steps=config.steps,
                warmup_steps=update.warmup_steps,
                restarts=config.schedule_restarts,
            )
        )
        for peak in (update.learning_rate, update.critic_learning_rate or update.learning_rate)
    ]
    optimizers = [build_optimizer(module, update, team, weights) for module, weights in modules]
    control = build_entropy_control(config.algorithm, config.loss)
    actor = PolicyLearner(policy, optimizers[0], algorithm, plan, rates[0], kl_coefficient, entropy_control=control)
    if not critics:
        return (actor,)
    critic = CriticLearner(critics[0], optimizers[1], algorithm, plan, rates[1], policy.microbatches)
    return actor_critic(actor, critic) if shared_trunk else (actor, critic)


def build_pace(config: RunBase) -> Pace:
    """The pace of a run of `config.steps` steps."""
    if config.time_budget is None:
        return Pace()
    return TimeBudget(config.budget_seconds, config.steps, restart=last_restart(config))


def build_optimizer(module: nn.Module, update: UpdateBase, team: Team = ALONE, weights: Weights = WHOLE) -> MasterAdamW:
    """Build AdamW over a module's parameters with the fields of [update]."""
    return MasterAdamW(
        module,
        lr=update.learning_rate,
        weight_decay=update.weight_decay,
        max_grad_norm=update.max_grad_norm,
        team=team,
        weights=weights,
        eight_bit_moments=update.eight_bit_moments,
    )


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
        advantages = algorithm.estimate_advantages(batch)
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
