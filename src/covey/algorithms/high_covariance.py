"""Clip-Cov and KL-Cov: the decisions that would lower the entropy most are learnt less.

Shapes: B rollouts, T decisions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.core import covariance, kl
from covey.data import Batch


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
