"""Advantages: how much better a rollout did than its siblings.

Shapes: B rollouts. `group_B` numbers the groups from 0; `valid_B` is False if grading failed; such a
row has no advantage and does not count in its group.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rewards of a group whose relative difference is at most this differ by rounding only.
# Dividing such residue by its own standard deviation would turn it into advantages of order one.
RELATIVE_RANGE = 1e-6


def group_zscore(reward_B: Tensor, group_B: Tensor, valid_B: Tensor, *, eps: float = 1e-6, ddof: int = 0) -> Tensor:
    """Reward of a rollout in standard deviations of its group.

    A_i = (r_i - mean(r)) / (std(r) + eps)      DeepSeekMath (arXiv 2402.03300), section 4.1.2

    Args:
        reward_B: one reward per rollout, float.
        group_B: group of each rollout, int64.
        valid_B: rollouts whose reward is known, bool.
        eps: keeps the division finite.
        ddof: 0 is the population's standard deviation, 1 the sample's (Bessel).

    Returns:
        advantage_B. Exactly 0 in groups whose rewards are all alike and on rows that are not valid.
    """
    centred_B = group_centered(reward_B, group_B, valid_B)
    count_B = _per_row(valid_B.to(reward_B.dtype), group_B)
    variance_B = _per_row(centred_B**2, group_B) / (count_B - ddof).clamp(min=1)
    return centred_B / (variance_B.sqrt() + eps)


def group_centered(reward_B: Tensor, group_B: Tensor, valid_B: Tensor) -> Tensor:
    """Reward of a rollout above the mean of its group.

    A_i = r_i - mean(r)      Dr.GRPO (arXiv 2503.20783), section 3.2; DeepSeekMath without the division

    Arguments and return as in `group_zscore`.
    """
    weight_B = valid_B.to(reward_B.dtype)
    reward_B = torch.where(valid_B, reward_B, 0.0)
    mean_B = _per_row(reward_B, group_B) / _per_row(weight_B, group_B).clamp(min=1)
    return torch.where(valid_B & ~_alike(reward_B, group_B, valid_B), reward_B - mean_B, 0.0)


def leave_one_out(reward_B: Tensor, group_B: Tensor, valid_B: Tensor) -> Tensor:
    """Reward of a rollout above the mean of the others in its group.

    A_i = r_i - 1/(G-1) sum_{j != i} r_j = G/(G-1) (r_i - mean(r))      RLOO (arXiv 2402.14740), section 2

    Arguments and return as in `group_zscore`. A row without valid siblings gets 0.
    """
    count_B = _per_row(valid_B.to(reward_B.dtype), group_B)
    return group_centered(reward_B, group_B, valid_B) * count_B / (count_B - 1).clamp(min=1)


def _alike(reward_B: Tensor, group_B: Tensor, valid_B: Tensor) -> Tensor:
    """True on rows of groups whose valid rewards are equal but for rounding."""
    groups = _groups(group_B)
    low = reward_B.new_full((groups,), torch.inf)
    high = reward_B.new_full((groups,), -torch.inf)
    low = low.scatter_reduce(0, group_B, torch.where(valid_B, reward_B, torch.inf), "amin")[group_B]
    high = high.scatter_reduce(0, group_B, torch.where(valid_B, reward_B, -torch.inf), "amax")[group_B]
    return (high - low) <= RELATIVE_RANGE * torch.maximum(high.abs(), low.abs())


def _per_row(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Sum of each row's group, laid out by row."""
    return value_B.new_zeros(_groups(group_B)).index_add(0, group_B, value_B)[group_B]


def _groups(group_B: Tensor) -> int:
    return int(group_B.max()) + 1
