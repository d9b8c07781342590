"""Preset algorithms, each composed as in its paper.

To add an algorithm, write a function of the same form with its source in the docstring.
"""

import inspect
from collections.abc import Callable
from functools import partial

from covey.algorithms.advantages import CreditAssignment, batch_normalized_returns, gae_advantage, outcome
from covey.algorithms.algorithm import Algorithm, ValueLoss
from covey.algorithms.kl_penalty import KLInReward, KLPenalty
from covey.core import baselines, loss_weights, policy_losses, ratios, returns, schedules


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(schedules.constant(0.04)),
    entropy_coefficient: float = 0.0,
    credit: CreditAssignment = outcome,
) -> Algorithm:
    """GRPO: DeepSeekMath (arXiv 2402.03300), eq. 3, with the coefficient 0.04 of its section 4.2."""
    return Algorithm(
        name="grpo",
        advantage=credit(baselines.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(policy_losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=loss_weights.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def dr_grpo(
    *,
    max_length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: CreditAssignment = outcome,
) -> Algorithm:
    """Dr.GRPO (arXiv 2503.20783), section 3.2: no division by the group's std or by the rollout's length, no KL.

    `max_length` is the constant divisor in place of the length, in decisions.
    """
    return Algorithm(
        name="dr_grpo",
        advantage=credit(baselines.group_centered),
        ratio=ratios.token_log_ratio,
        surrogate=partial(policy_losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=loss_weights.constant_length(max_length),
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: CreditAssignment = outcome,
) -> Algorithm:
    """DAPO (arXiv 2503.14476), eq. 8: asymmetric clipping, the mean over tokens, no KL.

    Its dynamic sampling and its overlong reward shaping are settings of a run's sampling and rewards.
    """
    return Algorithm(
        name="dapo",
        advantage=credit(baselines.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(policy_losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=loss_weights.token_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: CreditAssignment = outcome,
) -> Algorithm:
    """GSPO (arXiv 2507.18071), eq. 5 and 7: one ratio per rollout, with the clip range of its section 5.1."""
    return Algorithm(
        name="gspo",
        advantage=credit(baselines.group_zscore),
        ratio=ratios.sequence_log_ratio,
        surrogate=partial(policy_losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=loss_weights.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def cispo(
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: CreditAssignment = outcome,
) -> Algorithm:
    """CISPO (MiniMax-M1, arXiv 2506.13585), eq. 4: the importance weight is clipped, not the gradient; no lower
    bound, no KL.

    The paper does not give its upper bound. The default, a weight of at most 5, is that of TRL's documentation.
    """
    return Algorithm(
        name="cispo",
        advantage=credit(baselines.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(policy_losses.cispo, cap=1 + clip_high, least=1 - clip_low),
        aggregation=loss_weights.token_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def reinforce_pp(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    gamma: float = 1.0,
    kl: KLPenalty = KLPenalty(schedules.constant(0.01), KLInReward()),
    entropy_coefficient: float = 0.0,
) -> Algorithm:
    """REINFORCE++ (arXiv 2501.03262), section 3: no groups; discounted returns with a KL in the reward, whitened
    over the batch.
    """
    return Algorithm(
        name="reinforce_pp",
        advantage=batch_normalized_returns(baselines.group_zscore, gamma=gamma),
        ratio=ratios.token_log_ratio,
        surrogate=partial(policy_losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=loss_weights.token_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def rloo(
    *,
    kl: KLPenalty = KLPenalty(schedules.constant(0.05), KLInReward()),
    entropy_coefficient: float = 0.0,
    credit: CreditAssignment = outcome,
) -> Algorithm:
    """RLOO (arXiv 2402.14740), section 2: leave-one-out baseline, no clipping, k1 in the reward.

    The paper sums over the tokens of a completion, which is unbiased: `aggregation=loss_weights.constant_length(1)`.
    """
    return Algorithm(
        name="rloo",
        advantage=credit(baselines.leave_one_out),
        ratio=ratios.token_log_ratio,
        surrogate=policy_losses.policy_gradient,
        aggregation=loss_weights.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def reinforce(
    *, kl: KLPenalty = KLPenalty(), entropy_coefficient: float = 0.0, credit: CreditAssignment = outcome
) -> Algorithm:
    """REINFORCE (Williams 1992) with the group's mean as its baseline.

    As for `rloo`, the sum over tokens is unbiased: `aggregation=loss_weights.constant_length(1)`.
    """
    return Algorithm(
        name="reinforce",
        advantage=credit(baselines.group_centered),
        ratio=ratios.token_log_ratio,
        surrogate=policy_losses.policy_gradient,
        aggregation=loss_weights.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    whiten: bool = True,
    value_coefficient: float = 0.5,
    value_clip: float | None = None,
    kl: KLPenalty = KLPenalty(placement=KLInReward()),
    entropy_coefficient: float = 0.0,
) -> Algorithm:
    """PPO (arXiv 1707.06347), eq. 9, with GAE and a critic. An optional KL is k1 in the reward (DeepSeekMath, arXiv
    2402.03300, eq. 2).
    """
    error = partial(returns.clipped_squared_error, clip=value_clip) if value_clip else returns.squared_error
    return Algorithm(
        name="ppo",
        advantage=gae_advantage(gamma=gamma, lam=lam, whiten=whiten),
        ratio=ratios.token_log_ratio,
        surrogate=partial(policy_losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=loss_weights.token_mean,
        kl=kl,
        value_loss=ValueLoss(value_coefficient, error),
        entropy_coefficient=entropy_coefficient,
    )


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    build.__name__: build for build in (grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce_pp, ppo)
}


def default_kl(name: str) -> KLPenalty:
    """The KL penalty that an algorithm of `ALGORITHMS` has if it is given none."""
    penalty: KLPenalty = inspect.signature(ALGORITHMS[name]).parameters["kl"].default
    return penalty
