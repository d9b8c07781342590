"""Attention of training over shared prompts: torch's matrix products, the kernels between them.

A block of completions (blocks.py) attends to its prompts' keys in one product, in which the rows of a group stand side
by side, and to its own tokens' in another; one softmax runs over both. Scores exist for a block at a time, always in
the same memory, and are made again for the gradient: what is kept of a layer is its queries, keys and values.

Shapes: N tokens, H heads, K key-value heads, M = H / K, D head width; of a block: G groups of R rows, L tokens of
each, P of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.llm.blocks import Block, Blocks
from covey.llm.native.library import Kernels, Scores


class BlockAttention(torch.autograd.Function):
    """softmax(q k' scaling) v with rotary positions (arXiv 2104.09864), causal, over the blocks of a layout.

    q_NX, k_NY, v_NY hold a token's heads side by side, as the linear layers give them; so does the result.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NX: Tensor,
        k_NY: Tensor,
        v_NY: Tensor,
        cosine_ND: Tensor,
        sine_ND: Tensor,
        blocks: Blocks,
        scaling: float,
        kernels: Kernels,
    ) -> Tensor:
        work = _Work(kernels, blocks, scaling, (cosine_ND, sine_ND))
        query, key, value = work.placed(q_NX, rotate=True), work.placed(k_NY, rotate=True), work.placed(v_NY)
        work.repeat(key)
        work.repeat(value)
        out = torch.empty_like(query)
        for part in work.parts():
            prompt_weights, own_weights = part.weights(query, key)
            _add_products(part, prompt_weights, own_weights, value, out)
        ctx.save_for_backward(query, key, value)
        ctx.work = work
        return work.collected(out)

    @staticmethod
    def backward(ctx: Any, d_NX: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        work: _Work = ctx.work
        d = work.placed(d_NX.contiguous())
        dquery, dkey, dvalue = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for part in work.parts():
            prompt_weights, own_weights = weights = part.weights(query, key)
            prompt_slopes, own_slopes = slopes = part.products(d, value, scratch=1)
            part.own_keys(dvalue).baddbmm_(own_weights.mT, part.queries(d))
            if prompt_weights is not None:
                part.prompt_keys(dvalue).baddbmm_(prompt_weights.mT, part.across(d))
            work.kernels.soften_backward(part.shape, weights, slopes)
            _add_products(part, prompt_slopes, own_slopes, key, dquery)
            part.own_keys(dkey).baddbmm_(own_slopes.mT, part.queries(query))
            if prompt_slopes is not None:
                part.prompt_keys(dkey).baddbmm_(prompt_slopes.mT, part.across(query))
        work.add_up(dkey)
        work.add_up(dvalue)
        gradients = work.collected(dquery, rotated=True), work.collected(dkey, rotated=True), work.collected(dvalue)
        return *gradients, None, None, None, None, None


def _add_products(part: _Part, of_prompt: Tensor | None, of_own: Tensor, values: Tensor, out: Tensor) -> None:
    """out = of_prompt @ the prompt's values + of_own @ own values, where `part` has its queries."""
    if of_prompt is None:
        torch.bmm(of_own, part.own_keys(values), out=part.queries(out))
        return
    torch.bmm(of_prompt, part.prompt_keys(values), out=part.across(out))
    part.queries(out).baddbmm_(of_own, part.own_keys(values))


@dataclass(frozen=True)
class _Work:
    """What every block's work needs to know."""

    kernels: Kernels
    blocks: Blocks
    scaling: float
    angles: tuple[Tensor, Tensor]

    def placed(self, heads_NX: Tensor, *, rotate: bool = False) -> Tensor:
        """[size K, M D]: the heads of all tokens where the blocks have them, 0 at padding."""
        width = self.angles[0].shape[-1]
        wide = heads_NX.shape[1] // self.blocks.kv_heads
        make = heads_NX.new_zeros if self.blocks.padded else heads_NX.new_empty
        places = make(self.blocks.size * self.blocks.kv_heads, wide)
        self.kernels.arrange(heads_NX, places, self.angles if rotate else None, self.blocks, width)
        return places

    def collected(self, places: Tensor, *, rotated: bool = False) -> Tensor:
        """The inverse of `placed`; of what was rotated on the way there, this is the gradient's way back."""
        width = self.angles[0].shape[-1]
        heads_NX = places.new_empty(len(self.blocks.begins_N), self.blocks.kv_heads * places.shape[1])
        self.kernels.arrange(heads_NX, places, self.angles if rotated else None, self.blocks, width, back=True)
        return heads_NX

    def repeat(self, places: Tensor) -> None:
        """Gives every prompt its copy of what all begin with."""
        for beginning, copies in self._repetitions(places):
            copies.copy_(beginning)

    def add_up(self, places: Tensor) -> None:
        """The gradient of `repeat`: what all begin with has that of its copies too."""
        for beginning, copies in self._repetitions(places):
            beginning += copies.sum(dim=1, keepdim=True)

    def _repetitions(self, places: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """[K, 1, common, D] in the block of the common beginning, and [K, prompts, common, D] in a block of prompts."""
        for block in self.blocks.all:
            if block.repeated:
                parts = (self.rows(places, some) for some in (self.blocks.all[0], block))
                beginning, copies = (part.unflatten(0, (self.blocks.kv_heads, -1)) for part in parts)
                yield beginning, copies[:, :, : block.repeated]

    def rows(self, places: Tensor, block: Block) -> Tensor:
        """[K G R, L, (M) D] of a block."""
        kv_heads = self.blocks.kv_heads
        rows = places[block.base * kv_heads : block.end * kv_heads]
        return rows.view(kv_heads * block.groups * block.rows, block.length, -1)

    def parts(self) -> Iterator[_Part]:
        for block in self.blocks.all:
            for first, end in block.pieces(self.blocks.heads):
                yield _Part(self, block, first, end)


@dataclass(frozen=True)
class _Part:
    """The queries `first` to `end` of every row of a block. Its views are batches of matrices, without copies."""

    work: _Work
    block: Block
    first: int
    end: int

    def queries(self, places: Tensor) -> Tensor:
        """[K G R, queries M, D]."""
        return self.work.rows(places, self.block)[:, self.first : self.end].unflatten(2, (-1, self.width)).flatten(1, 2)

    def across(self, places: Tensor) -> Tensor:
        """[K G, R queries M, D]: the queries of a group's rows side by side. Where there are several, all are taken."""
        queries = self.queries(places)
        shared = self.work.blocks.kv_heads * self.block.groups
        return queries if self.block.rows == 1 else queries.view(shared, -1, self.width)

    def own_keys(self, places: Tensor) -> Tensor:
        """[K G R, end, D]: what the last of the queries sees of its own sequence."""
        return self.work.rows(places, self.block)[:, : self.end]

    def prompt_keys(self, places: Tensor) -> Tensor:
        """[K G, P, D]."""
        assert self.block.prompts is not None
        return self.work.rows(places, self.block.prompts)

    def products(
        self, left: Tensor, right: Tensor, scratch: int, less: tuple[Tensor | None, Tensor] | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Queries of `left` times keys of `right`: [K G, R queries M, P] of prompts, own [K G R, queries M, end].

        With `less`, products that were rounded, what rounding took from them.
        """
        memory = self.work.blocks.scratch(left.dtype, scratch)

        def multiply(queries: Tensor, keys: Tensor, begin: int, rounded: Tensor | None) -> Tensor:
            out = memory[begin:][: queries.shape[0] * queries.shape[1] * keys.shape[1]].view(*queries.shape[:2], -1)
            if rounded is None:
                return torch.bmm(queries, keys.mT, out=out)
            return torch.baddbmm(rounded, queries, keys.mT, beta=-1, out=out)

        of_prompt, of_own = less or (None, None)
        own = multiply(self.queries(left), self.own_keys(right), 0, of_own)
        if self.block.prompts is None:
            return None, own
        return multiply(self.across(left), self.prompt_keys(right), own.numel(), of_prompt), own

    def weights(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor]:
        """Softmax over prompt and own tokens.

        A score of 10 in bf16 is off by up to 0.03, and its weight by as much. So what rounding takes from the scores is
        made by a second product and added where they are read.
        """
        scores = self.products(query, key, scratch=0)
        exact = query.dtype == torch.float32
        rests = (None, None) if exact else self.products(query, key, scratch=1, less=scores)
        self.work.kernels.soften(self.shape, scores, rests)
        return scores

    @property
    def shape(self) -> Scores:
        blocks, block = self.work.blocks, self.block
        return Scores(
            prompts=None if block.prompt_lengths_G is None else block.prompt_lengths_G.data_ptr(),
            kv_heads=blocks.kv_heads, groups=block.groups, rows=block.rows,
            first=self.first, queries=self.end - self.first, heads=blocks.heads // blocks.kv_heads,
            prompt=block.shared, own=self.end, threads=torch.get_num_threads(), scaling=self.work.scaling,
        )  # fmt: skip

    @property
    def width(self) -> int:
        return self.work.angles[0].shape[-1]
