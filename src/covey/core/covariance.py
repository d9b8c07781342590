"""Covariance of log-probability and advantage, which drives the entropy, and the decisions of the highest covariance.

If a step adds eta A(a) to the logit of every action, as the natural policy gradient does, it changes the entropy to
first order by -eta times the covariance of log-probability and advantage under the policy (arXiv 2505.22617,
section 3): probable actions with a high advantage lower the entropy, improbable ones raise it.

Shapes: B rollouts, T decisions.
"""

import torch
from torch import Tensor

from covey.core.precision import widened


def covariance(logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Contribution of each decision to the covariance of log-probability and advantage.

    Cov(o) = (log pi(o) - mean(log pi)) (A - mean(A))      arXiv 2505.22617, eq. 10

    Args:
        logprobs_BT: of the policy that sampled, in nats.
        advantages_BT: of the same decisions.
        mask_BT: decisions over which the means are taken, bool.

    Returns:
        covariance_BT in nats, in the widest dtype of the device; 0 where the mask is False. Its mean over the decisions
        is the covariance.
    """
    count = mask_BT.sum().clamp(min=1)

    def centered(value_BT: Tensor) -> Tensor:
        value_BT = torch.where(mask_BT, widened(value_BT), 0.0)
        return torch.where(mask_BT, value_BT - value_BT.sum() / count, 0.0)

    return centered(logprobs_BT) * centered(advantages_BT)


def clip_cov(
    covariance_BT: Tensor, mask_BT: Tensor, uniform_BT: Tensor, *, fraction: float, low: float, high: float
) -> Tensor:
    """Clip-Cov: decisions of high covariance, drawn at random, that get no policy gradient.

    max(1, floor(fraction N)) of {o : low <= Cov(o) <= high}, without replacement      arXiv 2505.22617, eq. 11

    The paper draws floor(fraction N); at least one is that of its published code.

    Args:
        covariance_BT: of each decision, in nats.
        mask_BT: the N decisions, bool.
        uniform_BT: independent uniform numbers; the decisions with the smallest are drawn.
        fraction: of N.
        low, high: bounds of the covariance, in nats.

    Returns:
        chosen_BT, bool; all decisions within the bounds if they are fewer.
    """
    within_BT = mask_BT & (covariance_BT >= low) & (covariance_BT <= high)
    return _largest(-uniform_BT, within_BT, _share(mask_BT, fraction))


def kl_cov(covariance_BT: Tensor, mask_BT: Tensor, *, fraction: float) -> Tensor:
    """KL-Cov: the decisions of the highest covariance, which get a penalty on the distance from the old policy.

    {o : rank(Cov(o)) <= max(1, floor(fraction N))}      arXiv 2505.22617, eq. 13

    Of equal covariances the first decision is chosen. At least one decision is chosen, as in the published code.
    Arguments and return as in `clip_cov`.
    """
    return _largest(covariance_BT, mask_BT, _share(mask_BT, fraction))


def _share(mask_BT: Tensor, fraction: float) -> int:
    return max(1, int(fraction * int(mask_BT.sum())))


def _largest(value_BT: Tensor, among_BT: Tensor, count: int) -> Tensor:
    """Bool [B, T]: the `count` largest values among some decisions, or all of these if they are fewer."""
    place_N = among_BT.flatten().nonzero()[:, 0]
    best_N = value_BT.flatten()[place_N].argsort(descending=True, stable=True)[:count]
    chosen_BT = torch.zeros_like(among_BT)
    chosen_BT.view(-1)[place_N[best_N]] = True
    return chosen_BT
