"""Quality of a classifier's scores: accuracy, area under the ROC curve, calibration.

Shapes: N scored items, K bins of a reliability diagram.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from covey.core.precision import widened


class Reliability(NamedTuple):
    """A reliability diagram: items in bins of equal width by their predicted probability."""

    count_K: Tensor  # number of items
    predicted_K: Tensor  # mean predicted probability; 0 in an empty bin
    observed_K: Tensor  # fraction of positive items; 0 in an empty bin

    @property
    def error(self) -> float:
        """Expected calibration error: sum_k n_k / N |observed_k - predicted_k|; Guo et al. (arXiv 1706.04599), eq. 3.

        0 without items.
        """
        total = self.count_K.sum()
        gap_K = (self.observed_K - self.predicted_K).abs()
        return float((self.count_K * gap_K).sum() / total) if total else 0.0


def auc(score_N: Tensor, positive_N: Tensor) -> float | None:
    """Probability that a positive item has a higher score than a negative one; a tie counts one half.

    sum over pairs ([s+ > s-] + [s+ = s-] / 2) / (P M), the area under the ROC curve: Hanley and McNeil, Radiology 143
    (1982), with P positive and M negative items.

    Args:
        score_N: finite scores of any scale.
        positive_N: bool.

    Returns:
        None if all items are positive or all are negative.
    """
    values, place_N = widened(score_N).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    positive_V, negative_V = (
        widened(torch.bincount(place_N[chosen_N], minlength=len(values))) for chosen_N in (positive_N, ~positive_N)
    )
    below_V = negative_V.cumsum(0) - negative_V
    pairs = positive_V.sum() * negative_V.sum()
    return float((positive_V * (below_V + negative_V / 2)).sum() / pairs) if pairs else None


def reliability(probability_N: Tensor, positive_N: Tensor, bins: int = 10) -> Reliability:
    """Reliability diagram of predicted probabilities; Guo et al. (arXiv 1706.04599), section 2.

    Bin k has the items with k / K <= p < (k + 1) / K; the last one also those with p = 1.

    Args:
        probability_N: from 0 to 1.
        positive_N: bool, or a number from 0 to 1, such as one half for a tie.
        bins: K.
    """
    bin_N = (probability_N * bins).long().clamp(max=bins - 1)
    count_K = widened(torch.bincount(bin_N, minlength=bins))
    predicted_K, observed_K = (
        torch.bincount(bin_N, widened(value_N), minlength=bins) / count_K.clamp(min=1)
        for value_N in (probability_N, positive_N)
    )
    return Reliability(count_K, predicted_K, observed_K)
