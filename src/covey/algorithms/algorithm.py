"""An algorithm is a composition: advantage x ratio x surrogate x KL x distillation x aggregation x value loss.

Shapes: B rollouts, T decisions, V actions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.algorithms.advantages import AdvantageEstimator
from covey.algorithms.distillation import Distillation
from covey.algorithms.high_covariance import HighCovariance
from covey.algorithms.kl_penalty import KLPenalty
from covey.core import loss_weights, policy_losses, ratios, returns
from covey.data import Batch, PolicyOutput

SurrogateLoss = Callable[[Tensor, Tensor, Tensor], policy_losses.Surrogate]
CriticError = Callable[[Tensor, Tensor, Tensor], Tensor]  # values_BT, returns_BT, old_values_BT -> error_BT


@dataclass(frozen=True)
class ValueLoss:
    """The loss of the critic."""

    coefficient: float = 0.5
    error: CriticError = returns.squared_error


@dataclass(frozen=True)
class LossTerms:
    """The scalar loss of some rows, and the tensors from which metrics are computed."""

    loss: Tensor
    log_ratio_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor
    # Further values per decision, [B, T] by metric name; the metric is their mean over the decisions. `logged` is read
    # in every pass, `logged_first` only before the first optimizer step.
    logged: dict[str, Tensor] = field(default_factory=dict)
    logged_first: dict[str, Tensor] = field(default_factory=dict)
    importance: ratios.ImportanceWeight | None = None  # of trainer over sampler; None: no weights


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm, composed of independent parts."""

    name: str
    advantage: AdvantageEstimator
    ratio: ratios.LogRatio
    surrogate: SurrogateLoss
    aggregation: loss_weights.Aggregation
    kl: KLPenalty
    value_loss: ValueLoss | None = None  # None: there is no critic
    entropy_coefficient: float = 0.0  # of the entropy bonus
    importance: ratios.ImportanceWeights | None = None  # of trainer over sampler; None: no weights
    high_covariance: HighCovariance = HighCovariance()
    distillation: Distillation = Distillation()

    @property
    def needs_critic(self) -> bool:
        """True if there is a value loss."""
        return self.value_loss is not None

    def loss(self, output: PolicyOutput, batch: Batch, kl_coefficient: float) -> LossTerms:
        """Loss of the policy: a weighted sum over decisions.

        (loss_weights_BT * (w_BT * surrogate_BT + kl_coefficient * kl_BT - entropy_coefficient * entropy_BT
                            + distillation.weight * teacher_BT)).sum()

        The denominator of the ratio is the old policy as the trainer evaluates it. If there is one optimizer step per
        sampling, the old policy is the current one: the ratio is 1 and only its gradient matters. w_BT is 1, or the
        importance weight of the old policy against the sampler. KL-Cov adds its penalty at some decisions.

        Args:
            output: of the current policy for `batch`, with gradient.
            batch: prepared rows, on the device of `output`.
            kl_coefficient: of this step.
        """
        assert batch.advantages_BT is not None
        assert batch.loss_weights_BT is not None
        logprobs_BT = torch.where(batch.mask_BT, output.logprobs_BT, 0.0)
        old_BT = logprobs_BT.detach() if batch.proximal_logprobs_BT is None else batch.proximal_logprobs_BT
        log_ratio_BT = self.ratio(logprobs_BT, old_BT, batch.mask_BT)
        loss_BT, low_BT, high_BT = self.surrogate(logprobs_BT, log_ratio_BT, batch.advantages_BT)
        logged: dict[str, Tensor] = {}
        importance = None
        if self.importance is not None:
            importance = self.importance(old_BT, batch.behavior_logprobs_BT, batch.mask_BT)
            weight_BT, capped_BT, masked_BT = importance
            loss_BT = weight_BT * loss_BT
            logged |= {"mismatch/capped_fraction": capped_BT, "mismatch/masked_fraction": masked_BT}
        kl = self.kl.acting(kl_coefficient)
        loss_BT = kl.add(loss_BT, output, batch, kl_coefficient)
        loss_BT = self.high_covariance.add(loss_BT, logprobs_BT, old_BT, batch)
        loss_BT = self.distillation.add(loss_BT, output, batch)
        if self.entropy_coefficient:
            loss_BT = loss_BT - self.entropy_coefficient * torch.where(batch.mask_BT, output.entropy_BT, 0.0)
        loss = (batch.loss_weights_BT * loss_BT).sum()
        clipped = low_BT & batch.mask_BT, high_BT & batch.mask_BT
        measured = kl.measured(output) | self.distillation.measured(output)
        return LossTerms(loss, log_ratio_BT.detach(), *clipped, logged, measured, importance)

    def critic_loss(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """Value loss, a scalar: (loss_weights_BT * coefficient * error_BT).sum(). PPO (arXiv 1707.06347), eq. 9."""
        assert self.value_loss is not None
        assert batch.returns_BT is not None
        assert batch.values_BT is not None
        assert batch.loss_weights_BT is not None
        error_BT = self.value_loss.error(values_BT, batch.returns_BT, batch.values_BT)
        return self.value_loss.coefficient * (batch.loss_weights_BT * torch.where(batch.mask_BT, error_BT, 0.0)).sum()
