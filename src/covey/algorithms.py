"""An algorithm is a composition: advantage x ratio x surrogate x KL x aggregation x value loss.

To add one, write a function like those below that names its source. Shapes: B rollouts, T decisions, V actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from covey.config import ConfigError
from covey.core import advantages, aggregation, kl, ratios, schedules, surrogates, values
from covey.credits import AdvantageEstimator, Credit, critic, outcome, returns_over_batch
from covey.data import Batch, Evaluation

LogRatio = Callable[[Tensor, Tensor, Tensor], Tensor]  # logprobs_BT, old_logprobs_BT, mask_BT -> log_ratio_BT
SurrogateLoss = Callable[[Tensor, Tensor, Tensor], surrogates.Surrogate]
KLEstimator = Callable[[Tensor, Tensor], Tensor]  # logprobs_BT, reference_logprobs_BT -> kl_BT; or both BTV
CriticError = Callable[[Tensor, Tensor, Tensor], Tensor]  # values_BT, returns_BT, old_values_BT -> error_BT

_NEVER = schedules.constant(0.0)


@dataclass(frozen=True)
class KLPenalty:
    """The pull toward another policy: which, how it is estimated, how strong it is, and where it enters."""

    coefficient: schedules.Schedule = _NEVER
    estimator: KLEstimator = kl.k3  # kl.exact for policies that tell the probability of every action
    in_reward: bool = False  # subtracted from the reward, without gradient; else added to the loss
    to_behavior: bool = False  # KL(pi_old || pi), to the policy that sampled; else KL(pi || pi_ref)
    by_policy: bool = False  # the policy measures it itself (`Evaluation.kl_BT`); the estimator says what that is
    controller: schedules.KLController | None = None  # moves the coefficient after each step; None: the schedule does

    def __post_init__(self) -> None:
        """Refuse what would not pull.

        Raises:
            ConfigError: for a penalty in the reward that is exact, or to the policy that sampled.
        """
        if self.in_reward and self.estimator is kl.exact:
            raise ConfigError(
                "KLPenalty(kl.exact, in_reward=True): the exact KL does not depend on the decision that was sampled, "
                "so in its reward it pulls nowhere; use kl.k1, or leave out in_reward"
            )
        if self.in_reward and self.to_behavior:
            raise ConfigError(
                "KLPenalty(in_reward=True, to_behavior=True): when rewards are paid, the policy is still the one that "
                "sampled, and their KL is 0; leave out in_reward"
            )


@dataclass(frozen=True)
class ValueLoss:
    """What moves the critic."""

    coefficient: float = 0.5
    error: CriticError = values.squared_error


@dataclass(frozen=True)
class LossTerms:
    """The loss of some rows, ready for backward, and what it was made of."""

    loss: Tensor
    log_ratio_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor
    capped_BT: Tensor | None = None  # decisions whose importance weight is above its cap; None: there are no weights


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm along six independent axes."""

    name: str
    advantage: AdvantageEstimator
    ratio: LogRatio
    surrogate: SurrogateLoss
    aggregation: aggregation.Aggregation
    kl: KLPenalty
    value_loss: ValueLoss | None = None  # None: there is no critic
    entropy_coefficient: float = 0.0  # of a bonus for undecidedness
    importance_cap: float | None = None  # of the weights between sampler and trainer; None: there are none

    def loss(self, evaluation: Evaluation, batch: Batch, kl_coefficient: float) -> LossTerms:
        """(weights_BT * (w_BT * surrogate_BT + kl_coefficient * kl_BT - entropy_coefficient * entropy_BT)).sum().

        The ratio's denominator is the old policy as the trainer evaluates it; where one optimizer step follows each
        sampling, that is the current policy itself, so that the ratio is 1 and only its gradient matters. w_BT is 1, or
        `ratios.importance_weight` of that old policy against the sampler.
        """
        assert batch.advantages_BT is not None
        assert batch.weights_BT is not None
        logprobs_BT = torch.where(batch.mask_BT, evaluation.logprobs_BT, 0.0)
        old_BT = logprobs_BT.detach() if batch.proximal_logprobs_BT is None else batch.proximal_logprobs_BT
        log_ratio_BT = self.ratio(logprobs_BT, old_BT, batch.mask_BT)
        loss_BT, low_BT, high_BT = self.surrogate(logprobs_BT, log_ratio_BT, batch.advantages_BT)
        capped_BT = None
        if self.importance_cap is not None:
            sampler_BT = batch.behavior_logprobs_BT
            weight_BT, capped_BT = ratios.importance_weight(old_BT, sampler_BT, batch.mask_BT, self.importance_cap)
            loss_BT = weight_BT * loss_BT
        if kl_coefficient and not self.kl.in_reward:
            loss_BT = loss_BT + kl_coefficient * self._kl(evaluation, batch)
        if self.entropy_coefficient:
            loss_BT = loss_BT - self.entropy_coefficient * torch.where(batch.mask_BT, evaluation.entropy_BT, 0.0)
        loss = (batch.weights_BT * loss_BT).sum()
        return LossTerms(loss, log_ratio_BT.detach(), low_BT & batch.mask_BT, high_BT & batch.mask_BT, capped_BT)

    def critic_loss(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """(weights_BT * coefficient * error_BT).sum() over the rows of `batch`; PPO (arXiv 1707.06347), eq. 9."""
        assert self.value_loss is not None
        assert batch.returns_BT is not None
        assert batch.values_BT is not None
        assert batch.weights_BT is not None
        error_BT = self.value_loss.error(values_BT, batch.returns_BT, batch.values_BT)
        return self.value_loss.coefficient * (batch.weights_BT * torch.where(batch.mask_BT, error_BT, 0.0)).sum()

    def _kl(self, evaluation: Evaluation, batch: Batch) -> Tensor:
        """kl_BT of the penalty, 0 where undecided."""
        mask, current = batch.mask_BT, evaluation.logprobs_BT
        if self.kl.by_policy:
            assert evaluation.kl_BT is not None
            return torch.where(mask, evaluation.kl_BT, 0.0)
        other = batch.proximal_logprobs_BT if self.kl.to_behavior else batch.reference_logprobs_BT
        if self.kl.estimator is kl.exact:
            assert evaluation.distribution_BTV is not None
            mask, current = mask[..., None], evaluation.distribution_BTV
            other = batch.proximal_distribution_BTV if self.kl.to_behavior else batch.reference_distribution_BTV
        if other is None and self.kl.to_behavior:
            return torch.zeros_like(evaluation.logprobs_BT)  # the first step after sampling: the policies are one
        assert other is not None
        current, other = torch.where(mask, current, 0.0), torch.where(mask, other, 0.0)
        # Sampled by the behaviour policy, so KL(pi_old || pi) is the one that its estimators are unbiased for.
        return self.kl.estimator(other, current) if self.kl.to_behavior else self.kl.estimator(current, other)


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(schedules.constant(0.04)),  # noqa: B008
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """GRPO: DeepSeekMath (arXiv 2402.03300), eq. 3, with the coefficient 0.04 of its section 4.2."""
    return Algorithm(
        name="grpo",
        advantage=credit(advantages.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.sequence_mean,
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
    credit: Credit = outcome,
) -> Algorithm:
    """Dr.GRPO (arXiv 2503.20783), section 3.2: no division by the group's std nor by a rollout's length, no KL."""
    return Algorithm(
        name="dr_grpo",
        advantage=credit(advantages.group_mean_only),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.constant_length(max_length),
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
    credit: Credit = outcome,
) -> Algorithm:
    """DAPO (arXiv 2503.14476), eq. 8: more room above than below, every token counts the same, no KL.

    Its dynamic sampling and overlong shaping belong to the sampling of a run, which draws and pays for rollouts.
    """
    return Algorithm(
        name="dapo",
        advantage=credit(advantages.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.token_mean,
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
    credit: Credit = outcome,
) -> Algorithm:
    """GSPO (arXiv 2507.18071), eq. 5 and 7, clipped as in its section 5.1: one ratio per rollout."""
    return Algorithm(
        name="gspo",
        advantage=credit(advantages.group_zscore),
        ratio=ratios.sequence_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def cispo(
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """CISPO (MiniMax-M1, arXiv 2506.13585), eq. 4: the weight is clipped, not the gradient; no lower bound, no KL.

    The paper tunes the upper bound and does not print it; a weight of at most 5 is what TRL's documentation takes.
    """
    return Algorithm(
        name="cispo",
        advantage=credit(advantages.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.capped_score, cap=1 + clip_high, least=1 - clip_low),
        aggregation=aggregation.token_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def reinforce_pp(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(schedules.constant(0.01), kl.k1, in_reward=True),  # noqa: B008
    entropy_coefficient: float = 0.0,
) -> Algorithm:
    """REINFORCE++ (arXiv 2501.03262), section 3: no groups; returns with the KL in them, whitened over the step."""
    return Algorithm(
        name="reinforce_pp",
        advantage=returns_over_batch(advantages.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.token_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def rloo(
    *,
    kl: KLPenalty = KLPenalty(schedules.constant(0.05), kl.k1, in_reward=True),  # noqa: B008
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """RLOO (arXiv 2402.14740), section 2: leave-one-out baseline, no clipping, k1 in the reward.

    The paper sums over a completion's tokens, which is unbiased: `aggregation=aggregation.constant_length(1)`.
    """
    return Algorithm(
        name="rloo",
        advantage=credit(advantages.leave_one_out),
        ratio=ratios.token_log_ratio,
        surrogate=surrogates.score_function,
        aggregation=aggregation.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def reinforce(*, kl: KLPenalty = KLPenalty(), entropy_coefficient: float = 0.0, credit: Credit = outcome) -> Algorithm:
    """REINFORCE (Williams 1992) with the group's mean as its baseline; summed over tokens it is unbiased, as `rloo`."""
    return Algorithm(
        name="reinforce",
        advantage=credit(advantages.group_mean_only),
        ratio=ratios.token_log_ratio,
        surrogate=surrogates.score_function,
        aggregation=aggregation.sequence_mean,
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
    kl: KLPenalty = KLPenalty(estimator=kl.k1, in_reward=True),
    entropy_coefficient: float = 0.0,
) -> Algorithm:
    """PPO (arXiv 1707.06347), eq. 9, with GAE and a critic of its own; a KL, where there is one, is k1 in the reward
    (DeepSeekMath, arXiv 2402.03300, eq. 2).
    """
    error = partial(values.clipped_squared_error, clip=value_clip) if value_clip else values.squared_error
    return Algorithm(
        name="ppo",
        advantage=critic(gamma=gamma, lam=lam, whiten=whiten),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.token_mean,
        kl=kl,
        value_loss=ValueLoss(value_coefficient, error),
        entropy_coefficient=entropy_coefficient,
    )


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    build.__name__: build for build in (grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce_pp, ppo)
}
