"""A minimum length of turns: end tokens have probability 0 at the first decisions of a turn.

The sampler and every evaluation of a policy exclude the same tokens at the same decisions, so that their
log-probabilities are those of one distribution: the softmax over the other tokens.

Shapes: B rollouts, T actions, N decisions, V vocabulary, K tokens of a chunk of the vocabulary, E end tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXCLUDED_LOGIT = -1e30  # probability 0, but finite: -infinity times a probability of 0 would be NaN in the entropy


@dataclass(frozen=True)
class MinimumLength:
    """End tokens are excluded at the first `tokens` decisions of every turn; a completion is one turn."""

    tokens: int = 0  # 0: no minimum
    end_ids: frozenset[int] = frozenset()

    def early(self, mask_BT: Tensor) -> Tensor | None:
        """True at the decisions without end tokens; None if there is no minimum.

        A turn is a stretch of decisions: the first column and every decision after an undecided action begin one.

        Args:
            mask_BT: True at decisions.
        """
        if not self.tokens:
            return None
        column_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
        undecided_BT = torch.where(mask_BT, -1, column_T).cummax(dim=1).values  # the last one so far
        return mask_BT & (column_T - undecided_BT <= self.tokens)

    def excluded(self, early_N: Tensor | None) -> Excluded | None:
        """The end tokens of the decisions where `early_N` is True; None if it is None."""
        if early_N is None:
            return None
        return Excluded(early_N, torch.tensor(sorted(self.end_ids), dtype=torch.int64, device=early_N.device))


@dataclass(frozen=True, eq=False)
class Excluded:
    """Tokens with probability 0 at some of N decisions."""

    rows_N: Tensor  # bool, True at these decisions
    ids_E: Tensor  # int64

    def exclude(self, logits: Tensor, decisions: slice, tokens: slice) -> Tensor:
        """Set the logits of the excluded tokens, in place.

        Args:
            logits: [decisions, tokens], not yet divided by the temperature.
            decisions, tokens: the rows and the part of the vocabulary that they are, without a step.
        """
        first = tokens.start or 0
        inside_E = (self.ids_E >= first) & (self.ids_E < first + logits.shape[1])
        ids_E = self.ids_E[inside_E] - first
        logit = max(EXCLUDED_LOGIT, torch.finfo(logits.dtype).min)
        logits[:, ids_E] = logits[:, ids_E].masked_fill(self.rows_N[decisions, None], logit)
        return logits


NO_MINIMUM = MinimumLength()
