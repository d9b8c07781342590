"""Losses of reward models, and the reward of a completion from the scores of its steps.

Shapes: N pairs, completions or steps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

AGGREGATES = ("min", "product", "mean", "last")


def bradley_terry(
    chosen_N: Tensor, rejected_N: Tensor, margin_N: Tensor | None = None, *, center: float = 0.0
) -> Tensor:
    """Loss of preference pairs under the Bradley-Terry model, with an optional margin and centring term.

    -log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2

    InstructGPT (arXiv 2203.02155), eq. 1; margin: Llama 2 (arXiv 2307.09288), eq. 2; centring: arXiv 2312.09244, eq. 2.
    The pairs determine scores up to a constant for each prompt; the second term keeps them near 0.

    Args:
        chosen_N, rejected_N: scores of the preferred and of the other completion, with gradient.
        margin_N: difference that the scores should have at least; None: 0.
        center: weight of the centring term; 0.01 is usual.

    Returns:
        loss_N, in nats for `center` 0.
    """
    gap_N = chosen_N - rejected_N if margin_N is None else chosen_N - rejected_N - margin_N
    loss_N = -F.logsigmoid(gap_N)
    return loss_N + center * (chosen_N + rejected_N) ** 2 if center else loss_N


def cross_entropy(logit_N: Tensor, label_N: Tensor) -> Tensor:
    """Binary cross-entropy of sigmoid(logit) with a label from 0 to 1.

    -y log sigmoid(z) - (1 - y) log sigmoid(-z)

    Math-Shepherd (arXiv 2312.08935), eq. 1 for completions, and eq. 2 for steps (there the sum over the steps of a
    completion). A soft label y is a probability, as in its eq. 4.

    Args:
        logit_N: scores, with gradient.
        label_N: probabilities of being right.

    Returns:
        loss_N in nats.
    """
    return -label_N * F.logsigmoid(logit_N) - (1 - label_N) * F.logsigmoid(-logit_N)


def squared_error(score_N: Tensor, grade_N: Tensor) -> Tensor:
    """Squared error of a score for grades of any range: (r - y)^2.

    Args:
        score_N: scores, with gradient.
        grade_N: targets.

    Returns:
        loss_N.
    """
    return (score_N - grade_N) ** 2


def aggregate(score_N: Tensor, how: str) -> Tensor:
    """The score of a completion from those of its N steps.

    min_n s_n (Math-Shepherd, arXiv 2312.08935), prod_n s_n (Lightman et al., arXiv 2305.20050), their mean
    sum_n s_n / N, or the last one s_N.

    Args:
        score_N: probabilities that each step is right, in their order; at least one.
        how: a name of `AGGREGATES`.

    Returns:
        a scalar.
    """
    aggregates = {
        "min": lambda: score_N.min(),
        "product": lambda: score_N.prod(),
        "mean": lambda: score_N.mean(),
        "last": lambda: score_N[-1],
    }
    return aggregates[how]()


def step_differences(score_N: Tensor) -> Tensor:
    """Each step's score minus that of the step before, with 0 before the first.

    s_n - s_{n-1}: potential-based shaping (Ng, Harada and Russell, ICML 1999) with s as the potential and discount 1.
    The differences of a completion add up to its last score.

    Args:
        score_N: scores of the steps of one completion.

    Returns:
        difference_N.
    """
    return torch.diff(score_N, prepend=score_N.new_zeros(1))
