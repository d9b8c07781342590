"""How the tokens of a packed forward are cut into rectangles for the products of attention.

A block is some sequences side by side: prompts, or completions of one prompt. Inside it attention is batched matrix
products, over so few scores that they stay in the processor's cache from one product to the next.

Shapes: N tokens, H heads, K key-value heads, M = H / K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = 1 << 21  # of a block, at most: 4 MB in bf16
QUERIES = 64  # that are taken at a time even where they have more scores


@dataclass(frozen=True)
class Block:
    """`rows` sequences, of at most `length` tokens, behind `base` other tokens (padding counts)."""

    base: int
    rows: int
    length: int
    prompt: Prompt | None = None  # that all of them continue

    @property
    def end(self) -> int:
        return self.base + self.rows * self.length

    @property
    def keys(self) -> int:
        """How many tokens the last token of a sequence attends to."""
        return self.length + (self.prompt.length if self.prompt else 0)

    def pieces(self, heads: int) -> Iterator[tuple[int, int]]:
        """(first, end) of the queries to take at a time: all, unless a block of one sequence is too much at once."""
        step = max(SCORES // (heads * self.keys), QUERIES) if self.rows == 1 else self.length
        return ((first, min(first + step, self.length)) for first in range(0, self.length, step))


@dataclass(frozen=True)
class Prompt:
    """A prompt of `length` tokens, row `row` of its block."""

    block: Block
    row: int
    length: int


class Blocks:
    """The blocks of prompts, then those of completions; and the place of every token in them.

    Token n's heads of key-value head k lie behind `begins_N[n] + k * pitches_N[n]` others: [K, rows, length] per block.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        completion_lengths: Sequence[int],
        prompt_of_row: Sequence[int],
        heads: int,
        kv_heads: int,
    ) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.all: list[Block] = []
        self._scratch: dict[int, Tensor] = {}
        prompts = self._cut(range(len(prompt_lengths)), prompt_lengths, None)
        continued: list[list[int]] = [[] for _ in prompt_lengths]
        for row, prompt in enumerate(prompt_of_row):
            continued[prompt].append(row)
        completions = {}
        for number, rows in enumerate(continued):
            prompt = Prompt(*prompts[number], prompt_lengths[number])
            completions |= self._cut(rows, completion_lengths, prompt)
        lengths = [*prompt_lengths, *completion_lengths]
        placed = [prompts[i] for i in range(len(prompts))] + [
            completions.get(i) for i in range(len(completion_lengths))
        ]
        begins, pitches = [], []
        for length, place in zip(lengths, placed, strict=True):
            if place is None:  # fed nothing
                continue
            block, row = place
            begin = block.base * kv_heads + row * block.length
            begins.append(torch.arange(begin, begin + length))
            pitches.append(torch.full((length,), block.rows * block.length))
        self.begins_N, self.pitches_N = torch.cat(begins), torch.cat(pitches)
        self.size = self.all[-1].end
        self.padded = self.size > len(self.begins_N)

    def scratch(self, dtype: torch.dtype, number: int) -> Tensor:
        """Memory for the scores of any piece of a block; the same at every call with this number."""
        if number not in self._scratch:
            sizes = (
                block.rows * (end - first) * self.heads * (end + block.keys - block.length)
                for block in self.all
                for first, end in block.pieces(self.heads)
            )
            self._scratch[number] = torch.empty(max(sizes), dtype=dtype)
        return self._scratch[number]

    def _cut(
        self, sequences: Sequence[int], lengths: Sequence[int], prompt: Prompt | None
    ) -> dict[int, tuple[Block, int]]:
        """Blocks of sequences of similar length; returns block and row of each sequence that is not empty."""
        left = sorted((i for i in sequences if lengths[i]), key=lambda i: (-lengths[i], i))
        placed = {}
        while left:
            base, longest = self.all[-1].end if self.all else 0, lengths[left[0]]
            keys = longest + (prompt.length if prompt else 0)
            rows = min(max(SCORES // (self.heads * longest * keys), 1), len(left))
            block = Block(base, rows, longest, prompt)
            self.all.append(block)
            placed |= {sequence: (block, row) for row, sequence in enumerate(left[:rows])}
            left = left[rows:]
        return placed
