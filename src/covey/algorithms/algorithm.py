"""An algorithm is a composition: advantage x ratio x surrogate x KL x distillation x aggregation x value loss.

Shapes: B rollouts, T decisions, V actions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from covey.algorithms.advantages import AdvantageEstimator, Advantages
from covey.algorithms.kl_penalty import KLPenalty
from covey.core import covariance, kl, loss_weights, policy_losses, ratios, returns
from covey.data import Batch, PolicyOutput

# ---- terms of the loss that a run may add: a teacher, decisions of high covariance ----


@dataclass(frozen=True)
class HighCovariance:
    """What happens to decisions whose log-probability and advantage have a high covariance: arXiv 2505.22617,
    section 4.2. By default nothing.

    The covariances are those of the policy that sampled, over all decisions of a step, and are computed once. The
    paper's code computes them again for every microbatch, so its choice depends on the size of a microbatch.
    """

    clip_fraction: float = 0.0  # Clip-Cov: fraction of the decisions that have no policy gradient; 0: off
    clip_bounds: tuple[float, float] = (1.0, 5.0)  # of the covariance, in nats
    kl_fraction: float = 0.0  # KL-Cov: fraction of the decisions with a penalty; 0: off
    kl_coefficient: float = 1.0  # of this penalty

    @property
    def in_loss(self) -> bool:
        """True if there is a penalty, which has a gradient of its own."""
        return self.kl_fraction > 0

    def choose(
        self, batch: Batch, among_BT: Tensor, uniform: Callable[[Tensor], Tensor]
    ) -> tuple[Batch, dict[str, float]]:
        """Choose the decisions of a step.

        Args:
            batch: the prepared rows of the step.
            among_BT: the decisions that are compared, bool: those of groups with a non-zero advantage.
            uniform: draws a uniform number for each decision of a mask, [B, T]; called by Clip-Cov alone.

        Returns:
            The batch with an advantage of 0 at the decisions of Clip-Cov, which keep their part in every denominator,
            and with `penalised_BT` for KL-Cov; and metrics.
        """
        if not (self.clip_fraction or self.kl_fraction) or not among_BT.any():
            return batch, {}
        assert batch.advantages_BT is not None
        covariance_BT = covariance.covariance(batch.behavior_logprobs_BT, batch.advantages_BT, among_BT)
        compared_N = covariance_BT[among_BT]
        metrics = {"covariance/mean": float(compared_N.mean()), "covariance/max": float(compared_N.max())}
        if self.clip_fraction:
            low, high = self.clip_bounds
            chosen_BT = covariance.clip_cov(
                covariance_BT, among_BT, uniform(among_BT), fraction=self.clip_fraction, low=low, high=high
            )
            batch = replace(batch, advantages_BT=torch.where(chosen_BT, 0.0, batch.advantages_BT))
            metrics["covariance/clipped_fraction"] = float(chosen_BT.sum() / among_BT.sum())
        if self.kl_fraction:
            chosen_BT = covariance.kl_cov(covariance_BT, among_BT, fraction=self.kl_fraction)
            batch = replace(batch, penalised_BT=chosen_BT)
            metrics["covariance/penalised_fraction"] = float(chosen_BT.sum() / among_BT.sum())
        return batch, metrics

    def add(self, loss_BT: Tensor, logprobs_BT: Tensor, old_logprobs_BT: Tensor, batch: Batch) -> Tensor:
        """loss_BT + kl_coefficient |log rho| at the decisions of KL-Cov. arXiv 2505.22617, eq. 14 and listing 1.

        The paper's formula has the KL to the old policy, its code the absolute logarithm of the ratio, with which its
        results were made. Unlike its code, the surrogate of these decisions is that of the algorithm, with clipping.

        Args:
            logprobs_BT: of the current policy, with gradient; 0 at undecided columns.
            old_logprobs_BT: of the old policy.
        """
        if batch.penalised_BT is None:
            return loss_BT
        distance_BT = torch.where(batch.penalised_BT, kl.absolute(logprobs_BT, old_logprobs_BT), 0.0)
        return loss_BT + self.kl_coefficient * distance_BT


@dataclass(frozen=True)
class Distillation:
    """On-policy distillation: the divergence to a teacher at every decision of the policy's own rollouts, as a term of
    the loss. GKD (arXiv 2306.13649), eq. 4. By default there is no teacher.

    The divergence is computed in the policy's forward pass (`PolicyOutput.teacher_BT`).
    """

    weight: float = 0.0  # of the divergence in the loss; 0: there is no teacher
    beta: float = kl.REVERSE  # of the divergence (`covey.core.kl.jensen_shannon`)

    def rows(self, batch: Batch) -> Tensor:
        """Bool [B]: the rows that have a gradient whatever their advantages are."""
        return batch.has_teacher_B & (self.weight > 0)

    def add(self, loss_BT: Tensor, output: PolicyOutput, batch: Batch) -> Tensor:
        """loss_BT + weight * divergence_BT."""
        if output.teacher_BT is None:
            return loss_BT
        return loss_BT + self.weight * torch.where(batch.mask_BT, output.teacher_BT, 0.0)

    def measured(self, output: PolicyOutput) -> dict[str, Tensor]:
        """divergence_BT in nats, by the name of its metric; empty if the output has none."""
        return {} if output.teacher_BT is None else {"teacher/divergence": output.teacher_BT.detach()}


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

    @torch.no_grad()
    def estimate_advantages(self, batch: Batch) -> Advantages:
        """Call `advantage` without gradients: advantages, and a critic's targets, are constants of the loss."""
        return self.advantage(batch)

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
