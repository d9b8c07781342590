"""Truncation of the distribution that tokens are drawn from: top-k, top-p, min-p and a minimum length.

An update of the policy needs log-probabilities of the distribution that was sampled. The trainer computes those with a
minimum length (`covey.llm.model.minimum_length`). Top-k, top-p and min-p are for sampling without training.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Truncation:
    """Which tokens of a distribution may be drawn, in the order of transformers: top-k, then top-p of what is left,
    then min-p.
    """

    top_k: int = 0  # the most probable tokens, this many; 0: all
    top_p: float = 1.0  # the most probable tokens whose probabilities add up to this; 1: all
    min_p: float = 0.0  # tokens with at least this fraction of the largest probability; 0: all
    min_new_tokens: int = 0  # no end token is drawn before a completion has this many tokens, without the end token

    @property
    def _cuts_tail(self) -> bool:
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    def after(self, tokens: int) -> Truncation:
        """The truncation of what continues a completion of this many tokens."""
        return replace(self, min_new_tokens=max(self.min_new_tokens - tokens, 0))

    def restricts(self, shortest: int) -> bool:
        """True if a token may not be drawn after `shortest` tokens of a completion."""
        return self._cuts_tail or shortest < self.min_new_tokens

    def apply(self, logits_RV: Tensor, lengths_R: Tensor, end_ids: Tensor, temperature: float) -> Tensor:
        """The logits, with -infinity for the tokens that may not be drawn.

        Args:
            logits_RV: of any float dtype.
            lengths_R: number of tokens that a completion has so far.
            end_ids: token ids that end a completion.
            temperature: divides the logits; 0: argmax, for which only the minimum length matters.
        """
        if self.min_new_tokens:
            logits_RV = logits_RV.clone()
            logits_RV[:, end_ids] = logits_RV[:, end_ids].masked_fill(
                (lengths_R < self.min_new_tokens)[:, None], -torch.inf
            )
        if temperature == 0.0 or not self._cuts_tail:
            return logits_RV
        sorted_RV, order_RV = logits_RV.double().div(temperature).sort(dim=1, descending=True, stable=True)
        if self.top_k:
            sorted_RV[:, self.top_k :] = -torch.inf
        probability_RV = sorted_RV.softmax(dim=1)
        before_RV = probability_RV.cumsum(dim=1) - probability_RV  # of the more probable tokens
        dropped_RV = (before_RV >= self.top_p) | (probability_RV < self.min_p * probability_RV[:, :1])
        dropped_RV |= sorted_RV == -torch.inf
        dropped_RV[:, 0] = False
        return logits_RV.masked_fill(dropped_RV.scatter(1, order_RV, dropped_RV), -torch.inf)


WHOLE = Truncation()
