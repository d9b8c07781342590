"""Conversion between packed tokens and padded rows, with gradients that are deterministic on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RaggedPadding:
    """Converts between packed tokens and rows padded to one width. Rows may share tokens."""

    def __init__(self, places: list[Tensor], device: torch.device | None) -> None:
        """`places`: indices of each row's tokens. Each token is in at least one row."""
        self.rows, self.width = len(places), max(map(len, places), default=0)
        inside = torch.arange(self.width) < torch.tensor([len(row) for row in places], dtype=torch.int64)[:, None]
        cells = inside.flatten().nonzero()[:, 0]
        held = torch.cat(places) if places else torch.arange(0)
        in_order = torch.equal(held, torch.arange(len(held)))
        self.copies = None if in_order else _Repeats(held, device)
        self.even = in_order and len(held) == self.rows * self.width
        self.tokens = len(held) if self.copies is None else self.copies.tokens
        self.filled = cells.to(device)
        self.first = self.filled if self.copies is None else self.filled[self.copies.first]  # cell of each token

    def pad(self, flat: Tensor) -> Tensor:
        """[heads, tokens, D] -> [heads, rows, width, D], 0 at padding."""
        if self.copies is not None:
            flat = _Copy.apply(flat, self.copies)
        if not self.even:
            flat = ScatterColumns.apply(flat, self.filled, self.rows * self.width)
        return flat.unflatten(1, (self.rows, self.width))

    def unpad(self, padded: Tensor) -> Tensor:
        """[heads, rows, width, D] -> [tokens, heads, D]."""
        flat = padded.flatten(1, 2)
        return (flat if self.even else GatherColumns.apply(flat, self.first)).transpose(0, 1)


class _Repeats:
    """The column of each copy, and for every column its first copy, its second, and so on."""

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
    """Repeat columns. The gradients of a column's copies are added in fp32 and in a fixed order, which an accumulation
    by index on a GPU does not have."""

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
    """Write columns to distinct places of a larger tensor. The gradient is a plain gather, not an accumulation."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return columns.new_zeros(columns.shape[0], size, *columns.shape[2:]).index_copy_(1, places, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(1, places), None, None


class GatherColumns(torch.autograd.Function):
    """Read columns from distinct places of a larger tensor. The gradient is a plain scatter, not an accumulation."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = columns.shape[1]
        return columns.index_select(1, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        size = gradient.shape[0], ctx.size, *gradient.shape[2:]
        return gradient.new_zeros(size).index_copy_(1, places, gradient), None
