"""Continuous batching of conversations: a completion whose turn has ended waits with its keys and values for a reply.

The tokens of replies are fed together with the next token of the other rows. Completions that wait at the same tokens
share their row, and go on in one row if their replies are equal and come together.

Shapes: R open completions, B branches, N completions of all prompts, T tokens of the longest turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.llm.generation.batch import ContinuousBatch
from covey.llm.generation.native_decoder import NativeDecoder, ParkedRow


class ConversationBatch(ContinuousBatch):
    """A `ContinuousBatch` of conversations. A completion is a turn, and its number stays that of the conversation."""

    decoder: NativeDecoder

    def __init__(self, decoder: NativeDecoder, **arguments: Any) -> None:
        """`arguments`: as of `ContinuousBatch`; `max_rows` includes the conversations that wait."""
        super().__init__(decoder, **arguments)
        self.ended: list[int] = []  # conversations whose turn has ended; the caller empties it
        self.parked: dict[int, ParkedRow] = {}  # rows of the conversations that wait
        self.replies: dict[int, tuple[int, ...]] = {}  # tokens of the conversations that go on with the next step
        self.fed: list[tuple[int, ...]] | None = None  # tokens of every branch in the next step; None: `fed_B`

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

    def _step(self) -> list[Tensor]:
        fed, self.fed = self.fed, None
        return super()._step() if fed is None else [self.decoder.extend(fed)]

    def _end(self, ended_R: NDArray[np.int64], branch_R: NDArray[np.int64]) -> None:
        for number, branch in zip(ended_R.tolist(), branch_R.tolist(), strict=True):
            self.parked[number] = self.decoder.park(branch)
            self.ended.append(number)
