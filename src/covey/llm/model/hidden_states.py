"""Final hidden states at the positions that predict the decisions: the input of the output layer and of a value head.

Shapes: B rollouts, T actions, D decisions of the batch (the True entries of the mask, row by row), N distinct
decisions, L tokens of a forward pass, W hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from covey.data import Batch
from covey.llm.model.adapted_layers import with_present_adapter
from covey.llm.model.prefix_attention import PackedLayout, forward


@dataclass(frozen=True)
class ActionHiddenStates:
    """The hidden state that predicts each decision of a batch.

    Equal decisions of one group after a common prefix have one entry: N distinct decisions for D decisions.
    """

    hidden_NW: Tensor
    actions_N: Tensor
    index_D: Tensor  # index of each decision's entry, 0 to N - 1
    position_D: Tensor  # position of each decision in the flattened mask_BT
    batch: Batch
    early_N: Tensor | None = None  # True at the entries of the decisions that were marked as early; None without marks

    def scatter_to_batch(self, value_N: Tensor) -> Tensor:
        """value_BT: the value of each decision; 0 at undecided columns."""
        return scatter_to_batch(value_N[self.index_D], self.position_D, self.batch)


def hidden_states_for_actions(
    model: nn.Module, batch: Batch, *, packed: bool, early_BT: Tensor | None = None
) -> ActionHiddenStates:
    """Forward pass of a decoder without its output layer over a batch.

    Undecided tokens before a row's last decision are fed too, because later decisions attend to them.

    Args:
        model: a `base_model`.
        batch: on the device of the model.
        packed: feed all rows as one row of tokens, with each group's prompt once. Only for models whose attention takes
            a layout. Otherwise, the rollouts are fed one by one, and recomputed in the backward pass to bound memory.
        early_BT: marks of decisions (`MinimumLength.early`). Only decisions with equal marks share an entry.
    """
    position_D = batch.mask_BT.flatten().nonzero()[:, 0]
    actions_D = batch.actions_BT.flatten()[position_D]
    if packed:
        hidden_LW, source_BT = _packed(model, batch)
        source_D = source_BT.flatten().to(position_D.device)[position_D]
        actions = int(batch.actions_BT.max()) + 1
        key_D, early_D = source_D * actions + actions_D, _marks(early_BT, position_D)
        if early_D is not None:
            key_D = 2 * key_D + early_D
        decided_N, index_D = key_D.unique(return_inverse=True)
        early_N = None
        if early_D is not None:
            decided_N, early_N = decided_N // 2, decided_N % 2 == 1
        return ActionHiddenStates(
            hidden_LW[decided_N // actions], decided_N % actions, index_D, position_D, batch, early_N
        )
    rows, compute = [], with_present_adapter(model, _row)
    for row, length in enumerate(row_lengths(batch)):
        hidden_TW = checkpoint(compute, model, row_tokens(batch, row, length), length, use_reentrant=False)
        rows.append(hidden_TW[batch.mask_BT[row, :length]])
    return ActionHiddenStates(
        torch.cat(rows), actions_D, torch.arange(len(position_D), device=position_D.device), position_D, batch,
        _marks(early_BT, position_D),
    )  # fmt: skip


def _marks(early_BT: Tensor | None, position_D: Tensor) -> Tensor | None:
    return None if early_BT is None else early_BT.flatten()[position_D]


def kept_bytes(decisions: int, hidden: int, itemsize: int) -> int:
    """Bytes of `ActionHiddenStates.hidden_NW` for decisions that all differ."""
    return decisions * hidden * itemsize


def row_lengths(batch: Batch) -> list[int]:
    """Number of columns up to and including the last decision of each row."""
    return [int(n) for n in batch.mask_BT.shape[1] - batch.mask_BT.flip(1).int().argmax(dim=1)]


def row_tokens(batch: Batch, row: int, length: int) -> Tensor:
    """tokens_L of one rollout: the prompt and the first `length` actions, decided or not."""
    prompt = torch.tensor(batch.context[row], device=batch.actions_BT.device)
    return torch.cat([prompt, batch.actions_BT[row, :length]])


def scatter_to_batch(value_D: Tensor, position_D: Tensor, batch: Batch) -> Tensor:
    """value_BT with the value of each decision at its position in the flattened mask; 0 at undecided columns."""
    blank = torch.zeros(batch.mask_BT.numel(), dtype=value_D.dtype, device=value_D.device)
    return blank.index_copy(0, position_D, value_D).view_as(batch.mask_BT)


def _packed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """hidden_LW of one packed forward pass, and source_BT, the index of the token that predicts each column.

    The prompt's last token predicts the first column, every other column is predicted by the one before it. The last
    action of a rollout is not fed.
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
    for source_T, token_index in zip(source_BT, layout.token_index, strict=True):
        source_T[1 : 1 + len(token_index)] = token_index
    return hidden_LW, source_BT


def _row(model: nn.Module, tokens_L: Tensor, decisions: int) -> Tensor:
    """hidden_TW at the positions that predict the last `decisions` tokens."""
    hidden_LW: Tensor = model(input_ids=tokens_L[None, :-1], use_cache=False).last_hidden_state[0]
    return hidden_LW[-decisions:]
