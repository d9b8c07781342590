"""Servers of the simulation, which share their throughput among the completions that they generate.

A server generates n completions at a time, each at `Speed.each(n)` tokens/s. Between two changes of n every completion
advances alike, so a server keeps one number, the tokens that each of its completions has advanced since its start, and
a completion ends when that number reaches its own end (virtual time of processor sharing).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Speed(Protocol):
    """Throughput of a server as a function of the number of its completions."""

    def each(self, rows: int) -> float:
        """Tokens/s of each of `rows` completions that are generated together."""


@dataclass(frozen=True)
class RooflineSpeed:
    """min(alone, full / n) tokens/s each: limited by reading the weights, then by computing.

    `full` is the throughput of all completions together.
    """

    alone: float
    full: float

    def each(self, rows: int) -> float:
        """See `Speed`."""
        return min(self.alone, self.full / rows)


@dataclass(frozen=True)
class MeasuredSpeed:
    """Throughput that was measured at some numbers of completions; the seconds of a token are linear between them.

    Below the first point the seconds are those of the first, above the last they grow as between the last two.
    """

    rows: tuple[int, ...]  # ascending, at least two
    seconds: tuple[float, ...]  # of one token of all these completions

    def each(self, rows: int) -> float:
        """See `Speed`."""
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (x0, x1), (y0, y1) = self.rows[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return 1 / (y0 + max(rows - x0, 0) * (y1 - y0) / (x1 - x0))


class Completion(NamedTuple):
    """A completion in a server: its last token is generated when the server's progress reaches `end`."""

    end: float
    request: int


@dataclass
class Server:
    """A server with `slots` rows.

    Requests wait in the order in which they came. With `whole_requests` a request begins when there are rows for all
    its completions, as in `covey serve`; without, each completion begins by itself, as in vLLM.
    """

    speed: Speed
    slots: int
    whole_requests: bool = False
    now: float = 0.0  # time of the last change
    progress: float = 0.0  # tokens that a completion would have, had it been open from the beginning
    open: list[Completion] = field(default_factory=list)  # a heap
    waiting: deque[tuple[int, list[int]]] = field(default_factory=deque)  # (request, lengths without a row)
    busy_seconds: float = 0.0
    generated_tokens: float = 0.0
    down_until: float = 0.0

    @property
    def load(self) -> int:
        """Completions that are open or wait."""
        return len(self.open) + sum(len(lengths) for _, lengths in self.waiting)

    def next_end(self) -> float:
        """Time at which the next completion ends; infinite if none is open."""
        if not self.open:
            return math.inf
        return self.now + max(self.open[0].end - self.progress, 0.0) / self.speed.each(len(self.open))

    def advance(self, to: float) -> None:
        """Generate until `to`, which is not after `next_end`."""
        if self.open:
            tokens = (to - self.now) * self.speed.each(len(self.open))
            self.progress += tokens
            self.generated_tokens += tokens * len(self.open)
            self.busy_seconds += to - self.now
        self.now = to

    def has_room(self, completions: int) -> bool:
        """Whether a request for so many completions would begin at once."""
        return self.slots - self.load >= (completions if self.whole_requests else 1)

    def add(self, request: int, lengths: Sequence[int]) -> None:
        """Queue a request for completions of these lengths, then give rows to those that wait."""
        self.waiting.append((request, list(lengths)))
        self._fill()

    def end_first(self) -> int:
        """Close the completion that ends first, at the time of `next_end`; returns its request."""
        first = heapq.heappop(self.open)
        self.progress = first.end  # without the rounding of `advance`
        if not self.open:
            self.progress = 0.0
        self._fill()
        return first.request

    @property
    def remaining_tokens(self) -> float:
        """Tokens that are not yet generated of all requests."""
        of_open = sum(one.end - self.progress for one in self.open)
        return of_open + sum(sum(lengths) for _, lengths in self.waiting)

    def crash(self, restart_seconds: float) -> list[int]:
        """Lose all requests and be down for `restart_seconds`; returns the requests, ascending."""
        requests = {one.request for one in self.open} | {request for request, _ in self.waiting}
        self.open, self.progress = [], 0.0
        self.waiting.clear()
        self.down_until = self.now + restart_seconds
        return sorted(requests)

    def _fill(self) -> None:
        while self.waiting:
            request, lengths = self.waiting[0]
            free = self.slots - len(self.open)
            if free < (len(lengths) if self.whole_requests else 1):
                return
            begun, later = lengths[:free], lengths[free:]
            for tokens in begun:
                heapq.heappush(self.open, Completion(self.progress + tokens, request))
            self.waiting.popleft()
            if later:
                self.waiting.appendleft((request, later))
