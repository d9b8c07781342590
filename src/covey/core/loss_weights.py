"""Loss weights: the aggregation of the losses of single decisions into one number.

The loss of a training step is (loss_weights_BT * loss_BT).sum(). The weights are computed once, from the mask of all
decisions of the step and from global counts, so a division of the step into minibatches, microbatches or ranks does not
change their sum. Shapes: B rollouts, T decisions.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Counts(NamedTuple):
    """Global counts of a training step, over all ranks."""

    rollouts: int  # with at least one decision
    decisions: int


Aggregation = Callable[[Tensor, Counts], Tensor]


def count(mask_BT: Tensor) -> Counts:
    """The counts of one rank; with several ranks they are summed before the weights are computed.

    rollouts = |{i : sum_t m_{i,t} > 0}|, decisions = sum_{i,t} m_{i,t}
    """
    return Counts(rollouts=int(mask_BT.any(dim=1).sum()), decisions=int(mask_BT.sum()))


def sequence_mean(mask_BT: Tensor, counts: Counts) -> Tensor:
    """Mean over a rollout's decisions, then over rollouts: w_{i,t} = 1 / (B |o_i|). DeepSeekMath eq. 3.

    Args:
        mask_BT: decisions with a loss, bool.
        counts: of the whole training step.

    Returns:
        weights_BT, 0 where undecided.
    """
    length_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return mask_BT / (length_B1 * max(counts.rollouts, 1))


def token_mean(mask_BT: Tensor, counts: Counts) -> Tensor:
    """Mean over all decisions of the step: w_{i,t} = 1 / sum_i |o_i|. DAPO (arXiv 2503.14476), eq. 8.

    Arguments and return as in `sequence_mean`.
    """
    return mask_BT / float(max(counts.decisions, 1))


def constant_length(length: int) -> Aggregation:
    """Sum over a rollout's decisions divided by a constant, then mean over rollouts: w_{i,t} = 1 / (B length).

    Dr.GRPO (arXiv 2503.20783), section 3.2: the weight of a decision does not depend on the length of its rollout.

    Args:
        length: usually the token limit, in decisions.
    """

    def aggregate(mask_BT: Tensor, counts: Counts) -> Tensor:
        return mask_BT / float(max(counts.rollouts, 1) * length)

    return aggregate
