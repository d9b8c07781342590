"""An algorithm is a composition: advantage x ratio x surrogate x KL x aggregation.

To add one, write a function like those below that names its source. Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from covey.core import advantages, aggregation, kl, ratios, schedules, surrogates
from covey.data import Batch, Evaluation

OutcomeAdvantage = Callable[[Tensor, Tensor, Tensor], Tensor]  # reward_B, group_B, valid_B -> advantage_B
LogRatio = Callable[[Tensor, Tensor, Tensor], Tensor]  # logprobs_BT, old_logprobs_BT, mask_BT -> log_ratio_BT
SurrogateLoss = Callable[[Tensor, Tensor, Tensor], surrogates.Surrogate]
KLEstimator = Callable[[Tensor, Tensor], Tensor]  # logprobs_BT, reference_logprobs_BT -> kl_BT

_NEVER = schedules.constant(0.0)


@dataclass(frozen=True)
class KLPenalty:
    """The pull toward the reference policy: how it is estimated, how strong it is, and where it enters."""

    coefficient: schedules.Schedule = _NEVER
    estimator: KLEstimator = kl.k3
    in_reward: bool = False  # subtracted from the reward, without gradient; else added to the loss


@dataclass(frozen=True)
class LossTerms:
    """The loss of some rows, ready for backward, and what it was made of."""

    loss: Tensor
    log_ratio_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm along five independent axes."""

    name: str
    outcome_advantage: OutcomeAdvantage
    ratio: LogRatio
    surrogate: SurrogateLoss
    aggregation: aggregation.Aggregation
    kl: KLPenalty

    def advantage(self, batch: Batch) -> Tensor:
        """advantages_BT: every decision of a rollout shares the rollout's advantage, undecided columns have 0."""
        advantage_B = self.outcome_advantage(batch.reward_B, batch.group_B, batch.valid_B)
        return torch.where(batch.mask_BT, advantage_B[:, None], 0.0)

    def loss(self, evaluation: Evaluation, batch: Batch, kl_coefficient: float) -> LossTerms:
        """(weights_BT * (surrogate_BT + kl_coefficient * kl_BT)).sum() over the rows of `batch`.

        The ratio's denominator is the old policy as the trainer evaluates it; where one optimizer step follows each
        sampling, that is the current policy itself, so that the ratio is 1 and only its gradient matters.
        """
        assert batch.advantages_BT is not None
        assert batch.weights_BT is not None
        logprobs_BT = torch.where(batch.mask_BT, evaluation.logprobs_BT, 0.0)
        old_BT = logprobs_BT.detach() if batch.proximal_logprobs_BT is None else batch.proximal_logprobs_BT
        log_ratio_BT = self.ratio(logprobs_BT, old_BT, batch.mask_BT)
        loss_BT, low_BT, high_BT = self.surrogate(logprobs_BT, log_ratio_BT, batch.advantages_BT)
        if kl_coefficient and not self.kl.in_reward:
            assert batch.reference_logprobs_BT is not None
            reference_BT = torch.where(batch.mask_BT, batch.reference_logprobs_BT, 0.0)
            loss_BT = loss_BT + kl_coefficient * self.kl.estimator(logprobs_BT, reference_BT)
        loss = (batch.weights_BT * loss_BT).sum()
        return LossTerms(loss, log_ratio_BT.detach(), low_BT & batch.mask_BT, high_BT & batch.mask_BT)


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(schedules.constant(0.04)),  # noqa: B008
) -> Algorithm:
    """GRPO: DeepSeekMath (arXiv 2402.03300), eq. 3, with the coefficient 0.04 of its section 4.2."""
    return Algorithm(
        name="grpo",
        outcome_advantage=advantages.group_zscore,
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.sequence_mean,
        kl=kl,
    )


def dr_grpo(
    *,
    max_length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(),
) -> Algorithm:
    """Dr.GRPO (arXiv 2503.20783), section 3.2: no division by the group's std nor by a rollout's length, no KL."""
    return Algorithm(
        name="dr_grpo",
        outcome_advantage=advantages.group_mean_only,
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.constant_length(max_length),
        kl=kl,
    )


def rloo(*, kl: KLPenalty = KLPenalty(schedules.constant(0.05), kl.k1, in_reward=True)) -> Algorithm:  # noqa: B008
    """RLOO (arXiv 2402.14740), section 2: leave-one-out baseline, no clipping, k1 in the reward."""
    return Algorithm(
        name="rloo",
        outcome_advantage=advantages.leave_one_out,
        ratio=ratios.token_log_ratio,
        surrogate=surrogates.score_function,
        aggregation=aggregation.sequence_mean,
        kl=kl,
    )


def reinforce(*, kl: KLPenalty = KLPenalty()) -> Algorithm:
    """REINFORCE (Williams 1992) with the group's mean as its baseline."""
    return Algorithm(
        name="reinforce",
        outcome_advantage=advantages.group_mean_only,
        ratio=ratios.token_log_ratio,
        surrogate=surrogates.score_function,
        aggregation=aggregation.sequence_mean,
        kl=kl,
    )


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
}
