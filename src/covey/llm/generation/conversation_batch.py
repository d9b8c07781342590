"""Continuous batching of conversations, whose turns keep their keys and values.

In the training process (`ConversationBatch`) a completion whose turn has ended waits with its keys and values for a
reply. The tokens of replies are fed together with the next token of the other rows. Completions that wait at the same
tokens share their row, and go on in one row if their replies are equal and come together.

On a server (`TurnBatch`) a turn is a request whose prompt is everything so far. Its keys and values are kept when it
ends (`PrefixCache`), so that the next turn feeds only its last token and the reply, with the same bits.

Shapes: R open completions, B branches, N completions of all prompts, T tokens of the longest turn.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from covey.llm.generation.batch import ContinuousBatch
from covey.llm.generation.native_decoder import KeptRow, NativeDecoder, ParkedRow, keep, restore


class ConversationBatch(ContinuousBatch):
    """A `ContinuousBatch` of conversations. A completion is a turn, and its number stays that of the conversation."""

    decoder: NativeDecoder

    def __init__(self, decoder: NativeDecoder, **arguments: Any) -> None:
        """`arguments`: as of `ContinuousBatch`; `max_rows` includes the conversations that wait."""
        super().__init__(decoder, **arguments)
        self.ended: list[int] = []  # conversations whose turn has ended; the caller empties it
        self.parked: dict[int, ParkedRow] = {}  # rows of the conversations that wait
        self.replies: dict[int, tuple[int, ...]] = {}  # tokens of the conversations that go on with the next step

    @property
    def rows_in_use(self) -> int:
        return len(self.open_R) + len(self.parked)

    @property
    def can_advance(self) -> bool:
        """False if all conversations have ended or wait, or have no room because of those that wait."""
        admits = self.admitted < len(self.prompts) and self.max_rows - self.rows_in_use >= self.group_size
        return bool(len(self.open_R) or self.replies or admits)

    def turn(self, number: int) -> tuple[list[int], list[float]]:
        """Token ids and log-probabilities of the current or last turn of a conversation."""
        span = number, slice(self.lengths_N[number])
        return self.tokens_NT[span].tolist(), self.logprobs_NT[span].tolist()

    def reply(self, number: int, tokens: tuple[int, ...], uniforms_T: NDArray[np.float64]) -> None:
        """Let a conversation that waits go on.

        Args:
            number: of the conversation.
            tokens: the last token of its turn, which was drawn but not fed, and those of the reply.
            uniforms_T: random number of every decision of the next turn, whose limit is their number.
        """
        limit = len(uniforms_T)
        if missing := max(limit - self.uniforms_NT.shape[1], 0):
            for name in ("uniforms_NT", "tokens_NT", "logprobs_NT"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, missing))))
        self.uniforms_NT[number, :limit] = uniforms_T
        self.lengths_N[number], self.limits_N[number] = 0, limit
        self.replies[number] = tokens

    def end(self, number: int) -> None:
        """End a conversation that waits, and free its row."""
        self.decoder.release(self.parked.pop(number))

    def advance(self) -> None:
        if self.replies:
            self._bring_back()
        super().advance()

    def _bring_back(self) -> None:
        """Append the rows of all replies to the batch, and order the branches by prompt."""
        alike: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
        for number in sorted(self.replies):
            row = self.parked[number]
            alike.setdefault((row.slot, row.decoded, self.replies[number]), []).append(number)
        self.fed = [(token,) for token in self.fed_B.tolist()]
        for (_, _, tokens), numbers in alike.items():
            row, *others = (self.parked.pop(number) for number in numbers)
            for other in others:
                self.decoder.release(other)
            self.decoder.bring_back(row)
            self.open_R = np.append(self.open_R, numbers)
            self.branch_R = np.append(self.branch_R, [len(self.fed)] * len(numbers))
            self.fed.append(tokens)
        self.replies.clear()
        self._order_branches(self.fed)

    def _order_branches(self, fed: list[tuple[int, ...]]) -> None:
        """Rows with the same prompt must be neighbours, so that attention reads its keys and values once for them."""
        _, first = np.unique(self.branch_R, return_index=True)
        order_B = np.argsort(self.open_R[first] // self.group_size, kind="stable")
        self.decoder.select(torch.from_numpy(order_B))
        rank_B = np.argsort(order_B)
        order_R = np.argsort(rank_B[self.branch_R], kind="stable")
        self.open_R, self.branch_R = self.open_R[order_R], rank_B[self.branch_R][order_R]
        self.fed = [fed[branch] for branch in order_B]
        self.fed_B = torch.tensor([tokens[-1] for tokens in self.fed])

    def _end(self, ended_R: NDArray[np.int64], branch_R: NDArray[np.int64]) -> None:
        for number, branch in zip(ended_R.tolist(), branch_R.tolist(), strict=True):
            self.parked[number] = self.decoder.park(branch)
            self.ended.append(number)


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

    def _end(self, ended_R: NDArray[np.int64], branch_R: NDArray[np.int64]) -> None:
        for number, branch in zip(ended_R.tolist(), branch_R.tolist(), strict=True):
            own = self.tokens_NT[number, : self.lengths_N[number] - 1].tolist()  # the last was drawn, but not fed
            tokens = (*self.prompts[number // self.group_size], *own)
            if tokens not in self.cache:
                self.cache.put(tokens, keep(self.decoder, branch))
