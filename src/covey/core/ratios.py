"""Ratios of policies at the sampled decisions.

Shapes: B rollouts, T decisions. The ratios to the old policy are returned as logarithms; the surrogate exponentiates
them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exp(20) is 5e8: outside every clip range, and no overflow in fp32.
LOG_RATIO_LIMIT = 20.0


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


def importance_weight(
    logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """Importance weight of the trainer's old policy against the sampler.

    w_{i,t} = min(cap, pi_trainer(o_{i,t}) / pi_sampler(o_{i,t}))      IMPALA (arXiv 1802.01561), section 4.1

    Without a cap, a weighted mean over the sampler's decisions is an unbiased estimate of the mean under the trainer's
    policy. A cap bounds its variance, but adds a bias for decisions that are much less probable for the sampler than
    for the trainer.

    Args:
        logprobs_BT: of the old policy, as the trainer evaluates it, in nats.
        sampler_logprobs_BT: of the same decisions, by the sampler, in nats.
        mask_BT: decided columns, bool.
        cap: largest weight; 2 is usual.

    Returns:
        weight_BT, without a gradient, and capped_BT, True at the decisions whose ratio is above the cap. At undecided
        columns weight_BT is min(1, cap) and capped_BT is False.
    """
    log_ratio_BT = token_log_ratio(logprobs_BT, sampler_logprobs_BT, mask_BT).detach()
    return log_ratio_BT.exp().clamp(max=cap), mask_BT & (log_ratio_BT > math.log(cap))
