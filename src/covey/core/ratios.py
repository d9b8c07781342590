"""How far the current policy has moved from the one that sampled.

Shapes: B rollouts, T decisions. All ratios are returned as logarithms; `exp` happens once, in the surrogate.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is 5e8: beyond any clip range, and far from overflow in fp32.
LOG_RATIO_LIMIT = 20.0


def token_log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """One ratio per decision.

    log rho_{i,t} = log pi(o_{i,t} | q, o_{i,<t}) - log pi_old(o_{i,t} | q, o_{i,<t})      PPO (arXiv 1707.06347), eq. 6

    Args:
        logprobs_BT: of the current policy, in nats, with gradient.
        old_logprobs_BT: of the policy that sampled, in nats.
        mask_BT: decided columns, bool.

    Returns:
        log_ratio_BT, 0 where undecided. Masked before anything is exponentiated: an overflow at padding would
        otherwise turn into a NaN gradient although the loss stays finite.
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
