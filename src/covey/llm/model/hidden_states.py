"""The final hidden states at the positions that predict each decision: what every head (tokens, values) reads.

Shapes: B rollouts, T decisions, N decisions made (the true entries of the mask, row by row), L tokens of a forward
pass, W hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from covey.data import Batch
from covey.llm.model.prefix_attention import PackedLayout, forward


@dataclass(frozen=True)
class ActionHiddenStates:
    """Hidden states that predict a batch's decisions; siblings' equal decisions after a common prefix share one.

    Shapes: D decisions of the batch, N that differ.
    """

    hidden_NW: Tensor
    actions_N: Tensor
    which_D: Tensor  # of the N, each of the D is
    chosen_D: Tensor  # where each of them stands in the flattened mask_BT
    batch: Batch

    def spread(self, value_N: Tensor) -> Tensor:
        """value_BT: what was found of the decisions, where they stand, 0 where nothing was decided."""
        return spread(value_N[self.which_D], self.chosen_D, self.batch)


def hidden_states_for_actions(model: nn.Module, batch: Batch, *, packed: bool) -> ActionHiddenStates:
    """Run a decoder without its output layer over `batch`, which lies on the decoder's device.

    Undecided tokens before a row's last decision are fed too: the decisions after them attend to them. Their own
    predictions are not read.

    Args:
        model: a `base_model`.
        packed: all rows in one row of tokens, a group's prompt fed once. Only for models whose attention takes a
            layout; the others go rollout by rollout, recomputed for the gradient to bound memory.
    """
    chosen_D = batch.mask_BT.flatten().nonzero()[:, 0]
    actions_D = batch.actions_BT.flatten()[chosen_D]
    if packed:
        hidden_LW, source_BT = _packed(model, batch)
        source_D = source_BT.flatten().to(chosen_D.device)[chosen_D]
        actions = int(batch.actions_BT.max()) + 1
        decided_N, which_D = (source_D * actions + actions_D).unique(return_inverse=True)
        return ActionHiddenStates(hidden_LW[decided_N // actions], decided_N % actions, which_D, chosen_D, batch)
    rows = []
    for row, length in enumerate(row_lengths(batch)):
        hidden_TW = checkpoint(_row, model, row_tokens(batch, row, length), length, use_reentrant=False)
        rows.append(hidden_TW[batch.mask_BT[row, :length]])
    return ActionHiddenStates(
        torch.cat(rows), actions_D, torch.arange(len(chosen_D), device=chosen_D.device), chosen_D, batch
    )


def kept_bytes(decisions: int, hidden: int, itemsize: int) -> int:
    """Bytes of `ActionHiddenStates.hidden_NW` for decisions that all differ."""
    return decisions * hidden * itemsize


def row_lengths(batch: Batch) -> list[int]:
    """Columns up to and with the last decision of each row."""
    return [int(n) for n in batch.mask_BT.shape[1] - batch.mask_BT.flip(1).int().argmax(dim=1)]


def row_tokens(batch: Batch, row: int, length: int) -> Tensor:
    """tokens_L of one rollout: its prompt, then its first `length` actions, decided or not."""
    prompt = torch.tensor(batch.context[row], device=batch.actions_BT.device)
    return torch.cat([prompt, batch.actions_BT[row, :length]])


def spread(value_N: Tensor, chosen_N: Tensor, batch: Batch) -> Tensor:
    """value_BT: the decisions' values where they stand, 0 where nothing was decided."""
    blank = torch.zeros(batch.mask_BT.numel(), dtype=value_N.dtype, device=value_N.device)
    return blank.index_copy(0, chosen_N, value_N).view_as(batch.mask_BT)


def _packed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """hidden_LW of all tokens that are fed (a rollout's last is predicted but never fed), and source_BT: whose hidden
    state predicts which column; the prompt's last token for the first of a row, else the token before, decided or not.
    """
    device, lengths, actions_BT = batch.actions_BT.device, row_lengths(batch), batch.actions_BT.cpu()
    prompts: list[Any] = []
    prompt_of_row: list[int] = []
    previous = -1
    for row, group in enumerate(batch.group_B.tolist()):
        if group != previous:
            prompts.append(batch.context[row])
            previous = group
        prompt_of_row.append(len(prompts) - 1)
    completions = [actions_BT[row, : n - 1] for row, n in enumerate(lengths)]
    layout = PackedLayout(prompts, completions, prompt_of_row, device)
    hidden_LW = forward(model, layout.tokens, layout.positions, layout)

    source_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.int64)
    source_BT[:, 0] = layout.prompt_ends[prompt_of_row]
    for source_T, places in zip(source_BT, layout.places, strict=True):
        source_T[1 : 1 + len(places)] = places
    return hidden_LW, source_BT


def _row(model: nn.Module, tokens_L: Tensor, decisions: int) -> Tensor:
    """hidden_TW that predict the last `decisions` tokens."""
    hidden_LW: Tensor = model(input_ids=tokens_L[None, :-1], use_cache=False).last_hidden_state[0]
    return hidden_LW[-decisions:]
