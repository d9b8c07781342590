"""Returns, generalized advantage estimation, and value losses.

Shapes: B rollouts, T decisions. A row never crosses the end of an episode: everything after its last decision is in one
number, `bootstrap_value_B`. Undecided columns are skipped: t + 1 is the next decision.
"""

import torch
from torch import Tensor

from covey.core.baselines import RELATIVE_RANGE


def discounted_returns(value_BT: Tensor, mask_BT: Tensor, factor: float) -> Tensor:
    """Discounted sum of each decision's value and those after it.

    s_t = sum_{l >= 0} factor^l x_{t+l}      Sutton and Barto (2018), eq. 3.8

    Computed as a parallel prefix sum (Hillis and Steele 1986), in log2(T) passes over the whole tensor.

    Args:
        value_BT: x.
        mask_BT: decided columns, bool.
        factor: discount per decision.

    Returns:
        s_BT, 0 where undecided.
    """
    order_BT = _decided_first(mask_BT)
    sums_BT = torch.where(mask_BT, value_BT, 0.0).gather(1, order_BT)
    return torch.where(mask_BT, torch.zeros_like(sums_BT).scatter(1, order_BT, _scan(sums_BT, factor)), 0.0)


def gae(
    rewards_BT: Tensor, values_BT: Tensor, bootstrap_value_B: Tensor, mask_BT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (GAE).

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = sum_l (gamma lam)^l delta_{t+l}      GAE (arXiv 1506.02438), eq. 16

    Args:
        rewards_BT: reward of each decision.
        values_BT: V of the state before each decision.
        bootstrap_value_B: V after the last decision: 0 if the episode terminated, the critic's value if the rollout
            ended at a time limit or at the end of a fragment.
        mask_BT: decided columns, bool.
        gamma: discount per decision.
        lam: 0 gives A = delta, 1 gives A = return - V.

    Returns:
        advantages_BT and returns_BT = A + V, the critic's targets; both 0 where undecided.
    """
    order_BT = _decided_first(mask_BT)
    decided_BT = mask_BT.gather(1, order_BT)
    values = torch.where(mask_BT, values_BT, 0.0).gather(1, order_BT)
    rewards = rewards_BT.gather(1, order_BT)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    last_B1 = (mask_BT.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    following = following.scatter(1, last_B1, bootstrap_value_B[:, None])
    deltas = torch.where(decided_BT, rewards + gamma * following - values, 0.0)
    advantages = torch.where(decided_BT, _scan(deltas, gamma * lam), 0.0)
    blank_BT = torch.zeros_like(values)
    return blank_BT.scatter(1, order_BT, advantages), blank_BT.scatter(1, order_BT, advantages + values)


def squared_error(values_BT: Tensor, returns_BT: Tensor, old_values_BT: Tensor) -> Tensor:
    """Squared error of the values: (V_t - R_t)^2. PPO (arXiv 1707.06347), eq. 9.

    Args:
        values_BT: of the current critic, with gradient.
        returns_BT: the critic's targets.
        old_values_BT: unused; the critic's values before the update.

    Returns:
        error_BT.
    """
    return (values_BT - returns_BT) ** 2


def clipped_squared_error(values_BT: Tensor, returns_BT: Tensor, old_values_BT: Tensor, *, clip: float) -> Tensor:
    """Clipped value loss: max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2).

    A change of V by more than `clip` in one update does not reduce the loss. Engstrom et al. (arXiv 2005.12729),
    section 2. Arguments and return as in `squared_error`.
    """
    near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
    return torch.maximum((values_BT - returns_BT) ** 2, (near_BT - returns_BT) ** 2)


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Fraction of the returns' variance that the critic explains (R²): 1 - Var(R - V) / Var(R).

    Returns:
        a scalar: 1 for exact values, 0 for constant values; 0 also if all returns are equal.
    """
    returns, errors = returns_BT[mask_BT], (returns_BT - values_BT)[mask_BT]
    if not len(returns) or returns.max() - returns.min() <= RELATIVE_RANGE * returns.abs().max():
        return returns.new_zeros(())
    return 1 - errors.var(correction=0) / returns.var(correction=0)


def _decided_first(mask_BT: Tensor) -> Tensor:
    """Column indices of every row: decided columns first, in their order."""
    return (~mask_BT).to(torch.uint8).argsort(dim=1, stable=True)


def _scan(value_BT: Tensor, factor: float) -> Tensor:
    """sum_l factor^l x_{t+l} over all columns."""
    reach, power = 1, factor
    while reach < value_BT.shape[1] and power != 0:
        value_BT = value_BT + power * torch.nn.functional.pad(value_BT[:, reach:], (0, reach))
        reach, power = 2 * reach, power * power
    return value_BT
