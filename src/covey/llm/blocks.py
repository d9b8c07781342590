"""How the tokens of a packed forward are cut into rectangles for the products of attention.

A block is some sequences side by side: prompts, or the completions of some prompts that are a block too. Inside it
attention is batched matrix products, over so few scores that they stay in the processor's cache from one product to
the next. Small groups share a block, a large one has several. What all prompts begin with is a block of its own, the
first, whose keys and values every prompt repeats.

Shapes: N tokens, H heads, K key-value heads; of a block: G prompts continued (groups), R sequences for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

SCORES = 1 << 21  # of a block, at most: 4 MB in bf16
QUERIES = 64  # that are taken at a time even where they have more scores


@dataclass(frozen=True, eq=False)
class Block:
    """`groups` times `rows` sequences, of at most `length` tokens, behind `base` other tokens (padding counts)."""

    base: int
    groups: int
    rows: int
    length: int
    prompts: Block | None = None  # of completions: what each group continues
    prompt_lengths_G: Tensor | None = None  # int32
    repeated: int = 0  # of prompts: tokens of their common beginning, which have their queries in a block of their own

    @property
    def end(self) -> int:
        return self.base + self.groups * self.rows * self.length

    @property
    def shared(self) -> int:
        """Tokens of the longest prompt."""
        return self.prompts.length if self.prompts else 0

    def pieces(self, heads: int) -> Iterator[tuple[int, int]]:
        """(first, end) of the queries to take at a time: all, unless a block of one sequence is too much at once."""
        alone = self.groups * self.rows == 1
        step = max(SCORES // (heads * (self.shared + self.length)), QUERIES) if alone else self.length
        return ((first, min(first + step, self.length)) for first in range(self.repeated, self.length, step))


class Blocks:
    """The blocks of a layout, prompts before what continues them; and the place of every token in them.

    Token n's heads of key-value head k lie behind `begins_N[n] + k * pitches_N[n]` others: [K, G, R, length] per block.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        completion_lengths: Sequence[int],
        prompt_of_row: Sequence[int],
        heads: int,
        kv_heads: int,
        common: int = 0,
    ) -> None:
        self.heads, self.kv_heads, self.common = heads, kv_heads, common
        self.all: list[Block] = []
        if common:
            self._add(1, 1, common)
        self.prompt_lengths, self.completion_lengths = prompt_lengths, completion_lengths
        self._scratch: dict[int, Tensor] = {}
        continued: list[list[int]] = [[] for _ in prompt_lengths]
        for row in sorted(range(len(prompt_of_row)), key=lambda row: -completion_lengths[row]):
            if completion_lengths[row]:
                continued[prompt_of_row[row]].append(row)
        self._of_prompt: dict[int, tuple[Block, int]] = {}  # block of every sequence, and which of its rows it is
        self._of_row: dict[int, tuple[Block, int]] = {}
        for prompts in self._sets(continued):
            self._cut(prompts, [continued[prompt] for prompt in prompts])
        self.begins_N, self.pitches_N = self._places()
        self.size = self.all[-1].end
        self.padded = self.size > len(self.begins_N) + sum(block.rows * block.repeated for block in self.all)

    def scratch(self, dtype: torch.dtype, number: int) -> Tensor:
        """Memory for the scores of any piece of a block; the same at every call with this number."""
        if number not in self._scratch:
            sizes = (
                block.groups * block.rows * (end - first) * self.heads * (block.shared + end)
                for block in self.all
                for first, end in block.pieces(self.heads)
            )
            self._scratch[number] = torch.empty(max(sizes), dtype=dtype)
        return self._scratch[number]

    def _sets(self, continued: list[list[int]]) -> Iterator[list[int]]:
        """Prompts that share a block: of as many completions each, alike in length, few enough for SCORES."""

        def shape(prompt: int) -> tuple[int, int, int]:
            """How many completions, the longest (the first), and the prompt itself."""
            rows = continued[prompt]
            return len(rows), self.completion_lengths[rows[0]] if rows else 0, self.prompt_lengths[prompt]

        for _, alike in groupby(sorted(range(len(continued)), key=shape), key=lambda prompt: len(continued[prompt])):
            some: list[int] = []
            shared = 0
            for prompt in alike:
                rows, longest, length = shape(prompt)  # in ascending order of `longest`
                shared = max(shared, length)
                scores = self.heads * (len(some) + 1) * max(rows * longest * (shared + longest), shared**2)
                if some and scores > SCORES:
                    yield some
                    some, shared = [], length
                some.append(prompt)
            yield some

    def _cut(self, prompts: list[int], completions: list[list[int]]) -> None:
        """The block of some prompts, and what their completions (longest first) need."""
        lengths = [self.prompt_lengths[prompt] for prompt in prompts]
        shared = self._add(1, len(prompts), max(lengths), repeated=self.common)
        self._of_prompt |= {prompt: (shared, i) for i, prompt in enumerate(prompts)}
        left, lengths_G = completions, torch.tensor(lengths, dtype=torch.int32)
        while left[0]:
            longest = max(self.completion_lengths[rows[0]] for rows in left)
            fitting = max(SCORES // (self.heads * longest * (shared.length + longest) * len(left)), 1)
            rows = min(fitting, len(left[0])) if len(left) == 1 else len(left[0])
            block = self._add(len(left), rows, longest, prompts=shared, prompt_lengths_G=lengths_G)
            taken = [row for group in left for row in group[:rows]]
            self._of_row |= {row: (block, i) for i, row in enumerate(taken)}
            left = [group[rows:] for group in left]

    def _add(self, groups: int, rows: int, length: int, **more: Any) -> Block:
        base = self.all[-1].end if self.all else 0
        self.all.append(Block(base, groups, rows, length, **more))
        return self.all[-1]

    def _places(self) -> tuple[Tensor, Tensor]:
        """begins_N and pitches_N, in the order of the layout."""
        common = self.common
        sequences = [(0, common, self.all[0], 0)] if common else []
        sequences += [(common, length, *self._of_prompt[i]) for i, length in enumerate(self.prompt_lengths)]
        sequences += [(0, length, *self._of_row[i]) for i, length in enumerate(self.completion_lengths) if length]
        begins, pitches = [], []
        for first, end, block, row in sequences:
            begin = block.base * self.kv_heads + row * block.length
            begins.append(torch.arange(begin + first, begin + end))
            pitches.append(torch.full((end - first,), block.groups * block.rows * block.length))
        return torch.cat(begins), torch.cat(pitches)
