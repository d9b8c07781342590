"""An algorithm is a composition: advantage x ratio x surrogate x KL x aggregation x value loss.

Shapes: B rollouts, T decisions, V actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithms.advantages import AdvantageEstimator
from covey.config import ConfigError
from covey.core import kl, loss_weights, policy_losses, ratios, returns, schedules
from covey.data import Batch, PolicyOutput

LogRatio = Callable[[Tensor, Tensor, Tensor], Tensor]  # logprobs_BT, old_logprobs_BT, mask_BT -> log_ratio_BT
SurrogateLoss = Callable[[Tensor, Tensor, Tensor], policy_losses.Surrogate]
KLEstimator = Callable[[Tensor, Tensor], Tensor]  # logprobs_BT, reference_logprobs_BT -> kl_BT; or both BTV
CriticError = Callable[[Tensor, Tensor, Tensor], Tensor]  # values_BT, returns_BT, old_values_BT -> error_BT

_NEVER = schedules.constant(0.0)


@dataclass(frozen=True)
class KLPenalty:
    """KL penalty: the other policy, the estimator, the coefficient, and whether it enters the reward or the loss."""

    coefficient: schedules.Schedule = _NEVER
    estimator: KLEstimator = kl.k3  # kl.exact for policies that tell the probability of every action
    in_reward: bool = False  # subtracted from the reward, without gradient; else added to the loss
    to_behavior: bool = False  # KL(pi_old || pi), to the policy that sampled; else KL(pi || pi_ref)
    by_policy: bool = False  # the policy measures it itself (`PolicyOutput.kl_BT`); the estimator says what that is
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
    """The loss of the critic."""

    coefficient: float = 0.5
    error: CriticError = returns.squared_error


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
    aggregation: loss_weights.Aggregation
    kl: KLPenalty
    value_loss: ValueLoss | None = None  # None: there is no critic
    entropy_coefficient: float = 0.0  # of a bonus for undecidedness
    importance_cap: float | None = None  # of the weights between sampler and trainer; None: there are none

    def loss(self, evaluation: PolicyOutput, batch: Batch, kl_coefficient: float) -> LossTerms:
        """(loss_weights_BT * (w_BT * surrogate_BT + kl_coefficient * kl_BT - entropy_coefficient * entropy_BT)).sum().

        The ratio's denominator is the old policy as the trainer evaluates it; where one optimizer step follows each
        sampling, that is the current policy itself, so that the ratio is 1 and only its gradient matters. w_BT is 1, or
        `ratios.importance_weight` of that old policy against the sampler.
        """
        assert batch.advantages_BT is not None
        assert batch.loss_weights_BT is not None
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
        loss = (batch.loss_weights_BT * loss_BT).sum()
        return LossTerms(loss, log_ratio_BT.detach(), low_BT & batch.mask_BT, high_BT & batch.mask_BT, capped_BT)

    def critic_loss(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """(loss_weights_BT * coefficient * error_BT).sum() over the rows of `batch`; PPO (arXiv 1707.06347), eq. 9."""
        assert self.value_loss is not None
        assert batch.returns_BT is not None
        assert batch.values_BT is not None
        assert batch.loss_weights_BT is not None
        error_BT = self.value_loss.error(values_BT, batch.returns_BT, batch.values_BT)
        return self.value_loss.coefficient * (batch.loss_weights_BT * torch.where(batch.mask_BT, error_BT, 0.0)).sum()

    def _kl(self, evaluation: PolicyOutput, batch: Batch) -> Tensor:
        """kl_BT of the penalty, 0 where undecided."""
        mask, current = batch.mask_BT, evaluation.logprobs_BT
        if self.kl.by_policy:
            assert evaluation.kl_BT is not None
            return torch.where(mask, evaluation.kl_BT, 0.0)
        other = batch.proximal_logprobs_BT if self.kl.to_behavior else batch.reference_logprobs_BT
        if self.kl.estimator is kl.exact:
            assert evaluation.all_logprobs_BTV is not None
            mask, current = mask[..., None], evaluation.all_logprobs_BTV
            other = batch.proximal_all_logprobs_BTV if self.kl.to_behavior else batch.reference_all_logprobs_BTV
        if other is None and self.kl.to_behavior:
            return torch.zeros_like(evaluation.logprobs_BT)  # the first step after sampling: the policies are one
        assert other is not None
        current, other = torch.where(mask, current, 0.0), torch.where(mask, other, 0.0)
        # Sampled by the behaviour policy, so KL(pi_old || pi) is the one that its estimators are unbiased for.
        return self.kl.estimator(other, current) if self.kl.to_behavior else self.kl.estimator(current, other)
