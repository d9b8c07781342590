"""Group baselines: the advantage of a rollout relative to the other rollouts of its group.

Shapes: B rollouts. `group_B` numbers the groups from 0. `valid_B` is False if grading failed; such a row has the
advantage 0 and does not count in its group.
"""

import torch
from torch import Tensor

# Rewards of a group with at most this relative difference are considered equal: they differ by rounding only.
# Division of these differences by their standard deviation would give advantages of order 1.
RELATIVE_RANGE = 1e-6
# A sum of advantages that is this small beside its terms is considered 0: it is the residue of rounding and of eps.
CANCELLED = 1e-4


def group_zscore(reward_B: Tensor, group_B: Tensor, valid_B: Tensor, *, eps: float = 1e-6, ddof: int = 0) -> Tensor:
    """Z-score of a rollout's reward within its group.

    A_i = (r_i - mean(r)) / (std(r) + eps)      DeepSeekMath (arXiv 2402.03300), section 4.1.2

    Args:
        reward_B: one reward per rollout, float.
        group_B: group of each rollout, int64.
        valid_B: rollouts whose reward is known, bool.
        eps: added to the standard deviation.
        ddof: 0 for the population's standard deviation, 1 for the sample's (Bessel's correction).

    Returns:
        advantage_B. Exactly 0 in groups whose rewards are all equal, and on rows that are not valid.
    """
    centred_B = group_centered(reward_B, group_B, valid_B)
    count_B = _per_row(valid_B.to(reward_B.dtype), group_B)
    variance_B = _per_row(centred_B**2, group_B) / (count_B - ddof).clamp(min=1)
    return centred_B / (variance_B.sqrt() + eps)


def group_centered(reward_B: Tensor, group_B: Tensor, valid_B: Tensor) -> Tensor:
    """Reward of a rollout minus the mean of its group.

    A_i = r_i - mean(r)      Dr.GRPO (arXiv 2503.20783), section 3.2; DeepSeekMath without the division

    Arguments and return as in `group_zscore`.
    """
    weight_B = valid_B.to(reward_B.dtype)
    reward_B = torch.where(valid_B, reward_B, 0.0)
    mean_B = _per_row(reward_B, group_B) / _per_row(weight_B, group_B).clamp(min=1)
    return torch.where(valid_B & ~_all_equal(reward_B, group_B, valid_B), reward_B - mean_B, 0.0)


def leave_one_out(reward_B: Tensor, group_B: Tensor, valid_B: Tensor) -> Tensor:
    """Leave-one-out baseline: reward of a rollout minus the mean of the other rollouts of its group.

    A_i = r_i - 1/(G-1) sum_{j != i} r_j = G/(G-1) (r_i - mean(r))      RLOO (arXiv 2402.14740), section 2

    Arguments and return as in `group_zscore`. The advantage is 0 if no other row of the group is valid.
    """
    count_B = _per_row(valid_B.to(reward_B.dtype), group_B)
    return group_centered(reward_B, group_B, valid_B) * count_B / (count_B - 1).clamp(min=1)


def weighted_whitened_sum(
    advantage_BR: Tensor, weight_R: Tensor, valid_B: Tensor, *, eps: float = 1e-6, ddof: int = 0
) -> Tensor:
    """Weighted sum of the advantages by each reward, whitened over the batch.

    A_i = (s_i - mean(s)) / (std(s) + eps), s_i = sum_r w_r A_{i,r}      GDPO (arXiv 2601.05242), section 3.1

    Args:
        advantage_BR: advantages by each of R rewards, each compared within its group; 0 where a reward has no value.
        weight_R: weights of the rewards.
        valid_B: rollouts whose reward is known, bool.
        eps: added to the standard deviation over the valid rollouts.
        ddof: 0 for the population's standard deviation, 1 for the sample's.

    Returns:
        advantage_B. Exactly 0 where the terms of the sum cancel out, because 0 is also the mean of every group, and on
        rows that are not valid.
    """
    terms_BR = advantage_BR * weight_R
    sum_B = terms_BR.sum(dim=1)
    sum_B = torch.where(sum_B.abs() <= CANCELLED * terms_BR.abs().sum(dim=1), 0.0, sum_B)
    whitened_B = group_zscore(sum_B, torch.zeros_like(valid_B, dtype=torch.int64), valid_B, eps=eps, ddof=ddof)
    return torch.where(sum_B == 0, 0.0, whitened_B)


def _all_equal(reward_B: Tensor, group_B: Tensor, valid_B: Tensor) -> Tensor:
    """True on rows of groups whose valid rewards are equal up to rounding."""
    groups = _groups(group_B)
    low = reward_B.new_full((groups,), torch.inf)
    high = reward_B.new_full((groups,), -torch.inf)
    low = low.scatter_reduce(0, group_B, torch.where(valid_B, reward_B, torch.inf), "amin")[group_B]
    high = high.scatter_reduce(0, group_B, torch.where(valid_B, reward_B, -torch.inf), "amax")[group_B]
    return (high - low) <= RELATIVE_RANGE * torch.maximum(high.abs(), low.abs())


def _per_row(value_B: Tensor, group_B: Tensor) -> Tensor:
    """For each row, the sum over its group."""
    return value_B.new_zeros(_groups(group_B)).index_add(0, group_B, value_B)[group_B]


def _groups(group_B: Tensor) -> int:
    return int(group_B.max()) + 1
