"""Surrogate losses of the policy, one value per decision.

Shapes: B rollouts, T decisions. All surrogates have the arguments (logprobs_BT, log_ratio_BT, advantages_BT), so they
are interchangeable; some arguments are unused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """Loss per decision, and the decisions at which the lower or the upper clip bound was active (bool)."""

    loss_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor

    @classmethod
    def unclipped(cls, loss_BT: Tensor) -> Surrogate:
        """A loss that clips no decision."""
        unclipped_BT = torch.zeros_like(loss_BT, dtype=torch.bool)
        return cls(loss_BT, unclipped_BT, unclipped_BT)


def ppo_clip(
    logprobs_BT: Tensor,
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    """The clipped surrogate.

    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)      PPO (arXiv 1707.06347), eq. 7; asymmetric: DAPO
    (arXiv 2503.14476), eq. 8. With `dual_clip` c > 1, the loss of a negative advantage is at most -c A
    (arXiv 1912.09729, eq. 5).

    Args:
        logprobs_BT: unused; the ratio carries the gradient.
        log_ratio_BT: log rho, in nats, with gradient.
        advantages_BT: no gradient.
        clip_low, clip_high: the ratio is clipped to 1 - clip_low and 1 + clip_high.
        dual_clip: bound on the ratio for negative advantages; None for no bound.

    Returns:
        the loss; the decisions at which the lower bound was active (negative advantage; includes `dual_clip`); and
        those at which the upper bound was active (positive advantage).
    """
    ratio_BT = log_ratio_BT.exp()
    bounded_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, bounded_BT * advantages_BT)
    low_BT = (advantages_BT < 0) & (ratio_BT < 1 - clip_low)
    high_BT = (advantages_BT > 0) & (ratio_BT > 1 + clip_high)
    if dual_clip is not None:
        negative_BT = advantages_BT < 0
        loss_BT = torch.where(negative_BT, torch.minimum(loss_BT, -dual_clip * advantages_BT), loss_BT)
        low_BT = low_BT | (negative_BT & (ratio_BT > dual_clip))
    return Surrogate(loss_BT, low_BT, high_BT)


def policy_gradient(logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor) -> Surrogate:
    """The plain policy gradient.

    -A log pi(o)      REINFORCE (Williams 1992), section 4; its gradient is that of -rho A at rho = 1

    Args:
        logprobs_BT: in nats, with gradient.
        log_ratio_BT: unused.
        advantages_BT: no gradient.

    Returns:
        the loss; no decision is clipped.
    """
    return Surrogate.unclipped(-advantages_BT * logprobs_BT)


def cispo(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, *, cap: float, least: float = 0.0
) -> Surrogate:
    """The policy gradient with a detached, clipped importance weight: clipped decisions keep a gradient.

    -sg[clip(rho, least, cap)] A log pi(o)      CISPO (arXiv 2506.13585), eq. 4 and 5

    Args:
        logprobs_BT: in nats, with gradient.
        log_ratio_BT: log rho, in nats; its gradient is not used.
        advantages_BT: no gradient.
        cap: largest weight.
        least: smallest weight; the paper sets no lower bound.

    Returns:
        the loss, the decisions whose weight was raised to `least`, and those whose weight was lowered to `cap`.
    """
    ratio_BT = log_ratio_BT.detach().exp()
    low_BT, high_BT = ratio_BT < least, ratio_BT > cap
    return Surrogate(-ratio_BT.clamp(least, cap) * advantages_BT * logprobs_BT, low_BT, high_BT)


def shifted_clip_range(clip_low: float, clip_high: float, factor: float) -> tuple[float, float]:
    """The clip range that raises the entropy (factor above 1) or lowers it (below 1).

    (min(1, clip_low / factor), clip_high * factor)

    Clipping of negative advantages, below, raises the entropy; clipping of positive advantages, above, lowers it (Park
    et al., arXiv 2509.26114). So a factor above 1 clips more below and less above.

    Args:
        clip_low, clip_high: the clip range at factor 1: the ratio is clipped to 1 - clip_low and 1 + clip_high.
        factor: above 0.

    Returns:
        (clip_low, clip_high).
    """
    return min(1.0, clip_low / factor), clip_high * factor
