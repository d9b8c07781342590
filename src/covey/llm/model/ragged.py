"""Conversion between packed tokens and padded rows, with deterministic gradients, and the choice of microbatches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from covey.llm.model.prefix_attention import common_prefix_length


class RaggedPadding:
    """Converts between packed tokens and rows padded to one width. Rows may share tokens."""

    def __init__(self, token_indices: list[Tensor], device: torch.device | None) -> None:
        """`token_indices`: packed indices of each row's tokens. Each token is in at least one row."""
        self.rows, self.width = len(token_indices), max(map(len, token_indices), default=0)
        inside = (
            torch.arange(self.width) < torch.tensor([len(row) for row in token_indices], dtype=torch.int64)[:, None]
        )
        cells = inside.flatten().nonzero()[:, 0]
        flat = torch.cat(token_indices) if token_indices else torch.arange(0)
        identity = torch.equal(flat, torch.arange(len(flat)))
        self.copies = None if identity else _Repeats(flat, device)
        self.even = identity and len(flat) == self.rows * self.width
        self.tokens = len(flat) if self.copies is None else self.copies.tokens
        self.cells = cells.to(device)
        self.first = self.cells if self.copies is None else self.cells[self.copies.first]  # cell of each token

    def pad(self, flat: Tensor) -> Tensor:
        """[heads, tokens, D] -> [heads, rows, width, D], 0 at padding."""
        if self.copies is not None:
            flat = _Copy.apply(flat, self.copies)
        if not self.even:
            flat = ScatterColumns.apply(flat, self.cells, self.rows * self.width)
        return flat.unflatten(1, (self.rows, self.width))

    def unpad(self, padded: Tensor) -> Tensor:
        """[heads, rows, width, D] -> [tokens, heads, D]."""
        flat = padded.flatten(1, 2)
        return (flat if self.even else GatherColumns.apply(flat, self.first)).transpose(0, 1)


class _Repeats:
    """Index tensors of repeated columns: the column of each copy, and the first, second, ... copy of each column."""

    def __init__(self, of: Tensor, device: torch.device | None) -> None:
        order = of.argsort(stable=True)
        counts = of.bincount()
        number = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of[order]]  # index among the copies of its column
        self.tokens = len(counts)
        self.of = of.to(device)
        self.first = order[number == 0].to(device)
        turns = [order[number == turn] for turn in range(1, int(counts.max()))]
        self.more = [(of[copies].to(device), copies.to(device)) for copies in turns]


class _Copy(torch.autograd.Function):
    """Repeat columns. The backward pass adds the gradients of a column's copies in fp32 and in a fixed order, unlike
    an `index_add` on a GPU."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, copies: _Repeats) -> Tensor:
        ctx.copies = copies
        return columns.index_select(1, copies.of)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        exact = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.index_select(1, ctx.copies.first).to(exact)
        for columns, copies in ctx.copies.more:
            total.index_copy_(1, columns, total.index_select(1, columns) + gradient.index_select(1, copies))
        return total.to(gradient.dtype), None


class ScatterColumns(torch.autograd.Function):
    """Scatter columns to distinct indices of a larger tensor. The gradient is a gather, without accumulation."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        return columns.new_zeros(columns.shape[0], size, *columns.shape[2:]).index_copy_(1, index, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradient.index_select(1, index), None, None


class GatherColumns(torch.autograd.Function):
    """Gather columns from distinct indices of a larger tensor. The gradient is a scatter, without accumulation."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = columns.shape[1]
        return columns.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        size = gradient.shape[0], ctx.size, *gradient.shape[2:]
        return gradient.new_zeros(size).index_copy_(1, index, gradient), None


@dataclass(frozen=True)
class Row:
    """A row of a batch and the number of its tokens."""

    number: int  # index in the batch
    group: int
    tokens: int  # of its prompt and its actions up to the last decision
    shared: int  # length of the common prefix with the row before, if that is of the same group: it is fed once


def order_rows(groups: Sequence[int], prompt_lengths: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Row]:
    """Order the rows of a batch so that neighbours have long common prefixes.

    Groups are ordered by their longest completion, because rows of similar lengths need little padding. The rows of a
    group are in lexicographic order of their tokens: then the longest common prefix of a row is with its neighbour.

    Args:
        groups: group of each row.
        prompt_lengths: in tokens, of each row.
        completions: token ids of each row, up to its last decision.
    """
    longest: dict[int, int] = {}
    for group, actions in zip(groups, completions, strict=True):
        longest[group] = max(len(actions), longest.get(group, 0))
    numbers = sorted(range(len(groups)), key=lambda row: (longest[groups[row]], groups[row], completions[row], row))
    rows: list[Row] = []
    for number in numbers:
        shared = 0
        if rows and rows[-1].group == groups[number]:
            shared = prompt_lengths[number] + common_prefix_length(completions[rows[-1].number], completions[number])
        rows.append(Row(number, groups[number], prompt_lengths[number] + len(completions[number]), shared))
    return rows


def split_rows(rows: Sequence[Row], limit: int) -> list[list[Row]]:
    """Split ordered rows into microbatches of at most `limit` tokens, or of one row if it is longer.

    The number of microbatches is minimal. Then the largest is as small as possible, because it determines the memory.
    Groups stay whole if this needs no more microbatches, because the prompt of a split group is fed twice.
    """
    groups = [list(members) for _, members in groupby(rows, key=lambda row: row.group)]
    by_groups, by_rows = (len(_fill(groups, limit, whole_groups)) for whole_groups in (True, False))
    whole_groups = by_groups <= by_rows
    fitting = [size for size in map(_new_tokens, groups) if whole_groups and size <= limit]
    smallest = bisect_left(
        range(limit),
        True,
        lo=max(fitting, default=0),
        key=lambda size: len(_fill(groups, size, whole_groups)) <= min(by_groups, by_rows),
    )
    return _fill(groups, smallest, whole_groups)


def _new_tokens(group: Sequence[Row]) -> int:
    return sum(row.tokens - row.shared for row in group)


def _fill(groups: Sequence[Sequence[Row]], limit: int, whole_groups: bool) -> list[list[Row]]:
    """Fill microbatches greedily. With `whole_groups`, a group that fits into one microbatch is not split."""
    microbatches: list[list[Row]] = []
    tokens = 0
    for group in groups:
        new_piece = whole_groups and tokens + _new_tokens(group) > limit >= _new_tokens(group)
        for row in group:
            new = row.tokens - row.shared
            if not microbatches or new_piece or tokens + new > limit:
                microbatches.append([])
                tokens, new, new_piece = 0, row.tokens, False
            microbatches[-1].append(row)
            tokens += new
    return microbatches
