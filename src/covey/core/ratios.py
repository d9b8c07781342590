"""Ratios of policies at the sampled decisions.

Shapes: B rollouts, T decisions. The ratios to the old policy are returned as logarithms; the surrogate exponentiates
them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# exp(20) is 5e8: outside every clip range, and no overflow in fp32.
LOG_RATIO_LIMIT = 20.0

LogRatio = Callable[[Tensor, Tensor, Tensor], Tensor]  # logprobs_BT, old_logprobs_BT, mask_BT -> log_ratio_BT


def token_log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """One ratio per decision.

    log rho_{i,t} = log pi(o_{i,t} | q, o_{i,<t}) - log pi_old(o_{i,t} | q, o_{i,<t})      PPO (arXiv 1707.06347), eq. 6

    Args:
        logprobs_BT: of the current policy, in nats, with gradient.
        old_logprobs_BT: of the policy that sampled, in nats.
        mask_BT: decided columns, bool.

    Returns:
        log_ratio_BT, 0 where undecided. The mask is applied before any exponential, because an overflow at padding
        would give a NaN gradient although the loss is finite.
    """
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0.0)
    return log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """One ratio per rollout, the geometric mean of its decisions' ratios, repeated at every decision.

    log s_i = 1/|o_i| sum_t log rho_{i,t}      GSPO (arXiv 2507.18071), eq. 7

    Arguments and return as in `token_log_ratio`.
    """
    log_ratio_BT = token_log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    length_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    mean_B1 = log_ratio_BT.sum(dim=1, keepdim=True) / length_B1
    return torch.where(mask_BT, mean_B1, 0.0)


def sequence_product_log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """One ratio per rollout, the product of its decisions' ratios, repeated at every decision.

    log w_i = sum_t log rho_{i,t}

    It is the importance weight of a whole rollout (Precup, Sutton and Singh 2000). Its variance grows with the length
    of the rollout, unlike that of `sequence_log_ratio`.

    Arguments and return as in `token_log_ratio`.
    """
    log_ratio_BT = token_log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    total_B1 = log_ratio_BT.sum(dim=1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(mask_BT, total_B1, 0.0)


class ImportanceWeight(NamedTuple):
    """Weights of decisions; at undecided columns both masks are False and the weight is not used."""

    weight_BT: Tensor  # without a gradient
    capped_BT: Tensor  # bool, True where the ratio is above the cap
    masked_BT: Tensor  # bool, True where the ratio is outside of the bounds, and the weight 0


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights of the trainer's old policy against the sampler.

    rho_{i,t} = pi_trainer(o_{i,t}) / pi_sampler(o_{i,t})
    w_{i,t} = min(cap, rho_{i,t}) if low <= rho_{i,t} <= high, else 0

    The cap is that of IMPALA (arXiv 1802.01561, section 4.1), the bounds are IcePop (arXiv 2510.18855). Without both, a
    weighted mean over the sampler's decisions is an unbiased estimate of the mean under the trainer's policy. A cap
    bounds its variance, but adds a bias for decisions that are much less probable for the sampler than for the trainer.
    Bounds leave out the decisions about which the two disagree most.

    With `log_ratio = sequence_product_log_ratio`, rho is that of a whole rollout, and so are weight, cap and bounds.
    """

    cap: float = math.inf  # largest weight; 2 is usual
    low: float = 0.0
    high: float = math.inf
    log_ratio: LogRatio = token_log_ratio

    def __call__(self, logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor) -> ImportanceWeight:
        """The weight of each decision.

        Args:
            logprobs_BT: of the old policy, as the trainer evaluates it, in nats.
            sampler_logprobs_BT: of the same decisions, by the sampler, in nats.
            mask_BT: decided columns, bool.
        """
        ratio_BT = self.log_ratio(logprobs_BT, sampler_logprobs_BT, mask_BT).detach().exp()
        masked_BT = mask_BT & ((ratio_BT < self.low) | (ratio_BT > self.high))
        weight_BT = torch.where(masked_BT, 0.0, ratio_BT.clamp(max=self.cap))
        return ImportanceWeight(weight_BT, mask_BT & ~masked_BT & (ratio_BT > self.cap), masked_BT)


def effective_sample_fraction(weight_sum: float, square_sum: float, count: float) -> float:
    """Kish's effective sample size of importance weights, divided by their number.

    (sum w)^2 / (N sum w^2)      Kish, Survey Sampling, 1965

    1 if all weights are equal, 1 / N if one of them is all.

    Args:
        weight_sum: sum of the weights.
        square_sum: sum of their squares.
        count: number of weights, above 0.
    """
    return weight_sum**2 / (count * square_sum)
