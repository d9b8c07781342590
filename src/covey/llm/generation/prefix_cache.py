"""Keys and values of the turns of conversations, kept by a server from one request to the next.

A turn is a request whose prompt is everything so far. Its keys and values are kept when it ends, so that the next turn
feeds only its last token and the reply. `NativeDecoder` computes it then as a conversation in the training process
(`ConversationBatch`): with the same bits.

Shapes: R open completions, B branches, N completions of all prompts (`batch.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.llm.generation.batch import ContinuousBatch
from covey.llm.generation.native_decoder import KeptRow, NativeDecoder, keep, restore

KEPT_BYTES = 1 << 30  # of keys and values that a server keeps


class PrefixCache:
    """Rows by the tokens that were fed to them. Beyond `limit` bytes, the least recently used ones are forgotten.

    Whoever changes the weights must call `clear`.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.limit, self.bytes = limit, 0
        self._rows: OrderedDict[tuple[int, ...], KeptRow] = OrderedDict()
        self._lengths = Counter[int]()  # number of rows with so many tokens
        self._prompts = Counter[int]()  # number of rows that share a prompt, by its identity

    def __contains__(self, tokens: tuple[int, ...]) -> bool:
        return tokens in self._rows

    def put(self, tokens: tuple[int, ...], row: KeptRow) -> None:
        """Keep a row; forget others if there is too little room."""
        if tokens in self._rows:
            return
        self._rows[tokens] = row
        self._count(tokens, row, 1)
        while self.bytes > self.limit:
            self._count(*self._rows.popitem(last=False), -1)

    def find(self, prompt: Sequence[int]) -> tuple[int, KeptRow] | None:
        """The longest row whose tokens a prompt begins with, and their number, which is less than the prompt's."""
        for length in sorted((one for one in self._lengths if one < len(prompt)), reverse=True):
            tokens = tuple(prompt[:length])
            if (row := self._rows.get(tokens)) is not None:
                self._rows.move_to_end(tokens)
                return length, row
        return None

    def clear(self) -> None:
        """Forget all rows."""
        for kept in (self._rows, self._lengths, self._prompts):
            kept.clear()
        self.bytes = 0

    def _count(self, tokens: tuple[int, ...], row: KeptRow, change: int) -> None:
        self.bytes += change * row.own_bytes
        self._lengths[len(tokens)] += change
        before = self._prompts[id(row.prompt)]
        self._prompts[id(row.prompt)] += change
        if not before or not before + change:  # the first or the last row of the prompt
            self.bytes += change * row.prompt_bytes
        self._lengths, self._prompts = +self._lengths, +self._prompts  # without zeros


class TurnBatch(ContinuousBatch):
    """A `ContinuousBatch` of turns, which begins with the rows of earlier turns and keeps its own."""

    decoder: NativeDecoder

    def __init__(self, decoder: NativeDecoder, cache: PrefixCache, **arguments: Any) -> None:
        """`arguments`: as of `ContinuousBatch`."""
        super().__init__(decoder, **arguments)
        self.cache = cache
        self.cached: dict[int, int] = {}  # prompt -> number of its tokens that were not fed again
        self.fed: list[tuple[int, ...]] | None = None  # tokens of every branch in the next step; None: `fed_B`

    def advance(self) -> None:
        self._restore()
        super().advance()

    def _restore(self) -> None:
        """Append the rows of the next prompts to the batch, as long as the cache has them and rows are free."""
        if self.admitted == len(self.prompts):
            return
        fed: list[tuple[int, ...]] = [(token,) for token in self.fed_B.tolist()]
        before = len(fed)
        while self._free_rows() >= self.group_size and (found := self._find(self.admitted)):
            length, row = found
            restore(self.decoder, row)
            numbers = np.arange(self.admitted * self.group_size, (self.admitted + 1) * self.group_size)
            self.open_R = np.append(self.open_R, numbers)
            self.branch_R = np.append(self.branch_R, np.full(len(numbers), len(fed)))
            fed.append(tuple(self.prompts[self.admitted][length:]))
            self.cached[self.admitted] = length
            self.admitted += 1
        if len(fed) > before:
            self.fed, self.fed_B = fed, torch.tensor([tokens[-1] for tokens in fed])

    def _find(self, prompt: int) -> tuple[int, KeptRow] | None:
        return self.cache.find(self.prompts[prompt]) if prompt < len(self.prompts) else None

    def _admitted_until(self, end: int) -> int:
        return next((prompt for prompt in range(self.admitted, end) if self._find(prompt)), end)

    def _step(self) -> list[Tensor]:
        fed, self.fed = self.fed, None
        return super()._step() if fed is None else [self.decoder.extend(fed)]

    def _end(self, ended_R: NDArray[np.int64], branch_R: NDArray[np.int64]) -> None:
        for number, branch in zip(ended_R.tolist(), branch_R.tolist(), strict=True):
            own = self.tokens_NT[number, : self.lengths_N[number] - 1].tolist()  # the last was drawn, but not fed
            tokens = (*self.prompts[number // self.group_size], *own)
            if tokens not in self.cache:
                self.cache.put(tokens, keep(self.decoder, branch))
