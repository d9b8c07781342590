"""The final hidden states at the positions that predict each decision: what every head (tokens, values) reads.

Shapes: B rollouts, T decisions, N decisions really made (the true entries of the mask, row by row), W hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from covey.data import Batch
from covey.llm.attention import NO_MASK, PackedLayout


def hidden_at_decisions(model: PreTrainedModel, batch: Batch, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Run a decoder without its output layer over `batch`.

    Args:
        model: a `base_model`; its device must hold `batch` too.
        packed: all rows in one row of tokens, a group's prompt fed once. Only for models whose attention takes a
            layout; the others run one rollout at a time, recomputed for the gradient to bound memory.

    Returns:
        hidden_NW and chosen_N, the position of each decision in the flattened mask_BT.
    """
    chosen_N = batch.mask_BT.flatten().nonzero()[:, 0]
    lengths = decision_counts(batch)
    if packed:
        hidden_NW = _packed(model, batch, lengths)[chosen_N]
    else:
        hidden_NW = _row_by_row(model, batch, lengths)[chosen_N]
    return hidden_NW, chosen_N


def decision_counts(batch: Batch) -> list[int]:
    """Where each row's last decision stands, plus one."""
    return [int(n) for n in batch.mask_BT.shape[1] - batch.mask_BT.flip(1).int().argmax(dim=1)]


class _Source:
    """Picks hidden states by their place in the flattened mask, before the [B * T, W] rectangle exists."""

    def __init__(self, hidden_LW: Tensor, source_N: Tensor) -> None:
        self.hidden_LW, self.source_N = hidden_LW, source_N

    def __getitem__(self, chosen_N: Tensor) -> Tensor:
        return self.hidden_LW[self.source_N[chosen_N]]
