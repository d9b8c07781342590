"""KL penalty of an algorithm: its coefficient and its placement.

| placement      | the KL                                                         | acts on                     |
|----------------|----------------------------------------------------------------|-----------------------------|
| `KLInReward`   | KL(pi || pi_ref), estimated at the sampled decisions           | the reward of each decision |
| `KLInLoss`     | KL(pi || pi_ref), estimated or exact                           | the loss                    |
| `KLToBehavior` | KL(pi_old || pi), to the policy that sampled                   | the loss                    |
| `KLFromOutput` | KL(pi || pi_ref), exact, computed by the policy's forward pass | the loss                    |
| `NO_KL`        | KL(pi || pi_ref) of a few groups                               | nothing: it is only logged  |

A run whose coefficient is always 0 has no reference, and logs no KL to it.

Shapes: B rollouts, T decisions, V actions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.config import ConfigError
from covey.core import kl, schedules
from covey.data import Batch, PolicyOutput

KLEstimator = Callable[[Tensor, Tensor], Tensor]  # logprobs_BT, reference_logprobs_BT -> kl_BT; or both BTV

# If the KL is only logged, the reference evaluates one group in eight, at an eighth of the cost.
LOG_KL_EVERY = 8


@dataclass(frozen=True)
class KLPlacement:
    """Placement of a KL penalty, and the rows that the reference has to evaluate for it; this one only logs the KL."""

    estimator: KLEstimator = kl.k3
    metric = "kl"  # that an adaptive controller of the coefficient reads
    needs_reference = False
    in_loss = False  # True if the KL is a term of the loss, with a gradient of its own

    def rows_for_reward(self, batch: Batch) -> Tensor:
        """Bool [B]: the rows that the reference evaluates before the advantages are computed."""
        return torch.zeros_like(batch.valid_B)

    def rows_for_loss(self, batch: Batch, kept_B: Tensor) -> Tensor:
        """Bool [B]: the rows that the reference evaluates after that; `kept_B` marks the rows of the update."""
        return batch.valid_B & batch.fresh_B & (batch.group_B % LOG_KL_EVERY == 0)

    def penalise(self, batch: Batch, reference_logprobs_BT: Tensor, coefficient: float) -> Batch:
        """The batch with coefficient * KL subtracted from the rewards."""
        return batch

    def add(self, loss_BT: Tensor, output: PolicyOutput, batch: Batch, coefficient: float) -> Tensor:
        """loss_BT + coefficient * kl_BT."""
        return loss_BT

    def measured(self, output: PolicyOutput) -> dict[str, Tensor]:
        """kl_BT of the policy's output, in nats, by the name of its metric; empty if the output has none."""
        return {}


NO_KL = KLPlacement()


@dataclass(frozen=True)
class KLInReward(KLPlacement):
    """KL to the reference, subtracted from each decision's reward: DeepSeekMath (arXiv 2402.03300), eq. 2.

    It has no gradient of its own.

    Raises:
        ConfigError: for the exact KL, which has no effect in the reward.
    """

    estimator: KLEstimator = kl.k1
    needs_reference = True

    def __post_init__(self) -> None:
        if self.estimator is kl.exact:
            raise ConfigError(
                "KLInReward(kl.exact): the exact KL does not depend on the decision that was sampled, so it has no "
                "effect in the reward; use kl.k1, or KLInLoss(kl.exact)"
            )

    def rows_for_reward(self, batch: Batch) -> Tensor:
        return batch.valid_B

    def rows_for_loss(self, batch: Batch, kept_B: Tensor) -> Tensor:
        return torch.zeros_like(batch.valid_B)

    def penalise(self, batch: Batch, reference_logprobs_BT: Tensor, coefficient: float) -> Batch:
        penalty_BT = coefficient * self.estimator(batch.behavior_logprobs_BT, reference_logprobs_BT)
        penalty_BT = torch.where(batch.mask_BT & batch.valid_B[:, None], penalty_BT, 0.0)
        return replace(batch, reward_B=batch.reward_B - penalty_BT.sum(dim=1), rewards_BT=batch.rewards_BT - penalty_BT)


@dataclass(frozen=True)
class KLInLoss(KLPlacement):
    """KL to the reference as a term of the loss: DeepSeekMath (arXiv 2402.03300), eq. 3 and 4.

    `kl.exact` needs a policy whose output has the log-probability of every action.
    """

    estimator: KLEstimator = kl.k3
    needs_reference = True
    in_loss = True

    def rows_for_loss(self, batch: Batch, kept_B: Tensor) -> Tensor:
        return kept_B

    def add(self, loss_BT: Tensor, output: PolicyOutput, batch: Batch, coefficient: float) -> Tensor:
        mask, current, other = _arguments(
            self.estimator, output, batch, batch.reference_logprobs_BT, batch.reference_all_logprobs_BTV
        )
        assert other is not None
        return loss_BT + coefficient * self.estimator(current, torch.where(mask, other, 0.0))


@dataclass(frozen=True)
class KLToBehavior(KLPlacement):
    """KL(pi_old || pi) to the behavior policy as a term of the loss: PPO (arXiv 1707.06347), eq. 8.

    The decisions are sampled from pi_old, so the estimators are unbiased for this direction.
    """

    estimator: KLEstimator = kl.k3
    metric = "kl/behavior"
    in_loss = True

    def add(self, loss_BT: Tensor, output: PolicyOutput, batch: Batch, coefficient: float) -> Tensor:
        mask, current, other = _arguments(
            self.estimator, output, batch, batch.proximal_logprobs_BT, batch.proximal_all_logprobs_BTV
        )
        if other is None:  # one optimizer step per sampling: both policies are the same
            return loss_BT + coefficient * torch.zeros_like(output.logprobs_BT)
        return loss_BT + coefficient * self.estimator(torch.where(mask, other, 0.0), current)


@dataclass(frozen=True)
class KLFromOutput(KLPlacement):
    """Exact KL to the reference as a term of the loss, computed in the policy's forward pass (`PolicyOutput.kl_BT`).

    For language models, because the log-probabilities of the whole vocabulary are too large to store.
    """

    estimator: KLEstimator = kl.exact
    in_loss = True

    def rows_for_loss(self, batch: Batch, kept_B: Tensor) -> Tensor:
        return torch.zeros_like(batch.valid_B)

    def add(self, loss_BT: Tensor, output: PolicyOutput, batch: Batch, coefficient: float) -> Tensor:
        assert output.kl_BT is not None
        return loss_BT + coefficient * torch.where(batch.mask_BT, output.kl_BT, 0.0)

    def measured(self, output: PolicyOutput) -> dict[str, Tensor]:
        assert output.kl_BT is not None
        return {self.metric: output.kl_BT.detach()}


@dataclass(frozen=True)
class KLPenalty:
    """A KL penalty: a placement and a schedule of its coefficient. In a step with the coefficient 0 the KL is only
    logged.
    """

    coefficient: schedules.Schedule = schedules.constant(0.0)
    placement: KLPlacement = KLInLoss()

    def acting(self, coefficient: float) -> KLPlacement:
        """The placement in a step with this coefficient; `NO_KL` if it is 0."""
        return self.placement if coefficient else NO_KL

    def acts_within(self, steps: int) -> bool:
        """False if the coefficient is 0 in each of the first `steps` steps."""
        return any(map(self.coefficient, range(1, steps + 1)))


def _arguments(
    estimator: KLEstimator, output: PolicyOutput, batch: Batch, other_BT: Tensor | None, other_BTV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mask and log-probabilities for an estimator: [B, T] of the sampled actions, or [B, T, V] for the exact KL.

    Returns:
        (mask, current, other). `current` is 0 at undecided columns; `other` is None if the argument is.
    """
    if estimator is kl.exact:
        assert output.all_logprobs_BTV is not None
        mask_BT1 = batch.mask_BT[..., None]
        return mask_BT1, torch.where(mask_BT1, output.all_logprobs_BTV, 0.0), other_BTV
    return batch.mask_BT, torch.where(batch.mask_BT, output.logprobs_BT, 0.0), other_BT
