"""A team of threads: the ranks of a test without processes. Meets `covey.data.Team`."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
LIMIT = 100  # seconds; for ranks that do not make the same calls


class ThreadTeam:
    """One rank; all of them share `places`, where each puts its message, and a barrier."""

    def __init__(self, rank: int, size: int, shards: int, places: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.shards, self._places, self._barrier = rank, size, shards, places, barrier

    def _all(self, own: T) -> list[T]:
        self._places[self.rank] = own
        self._barrier.wait(LIMIT)
        found = list(self._places)
        self._barrier.wait(LIMIT)
        return found

    def exchange(self, message: bytes) -> list[bytes]:
        return self._all(message)

    def passes(self, own: int) -> int:
        return own

    def sum(self, tensors: Sequence[Tensor]) -> None:
        rows = self._all([tensor.clone() for tensor in tensors])
        while len(rows) > 1:
            rows = [
                [a + b for a, b in zip(left, right, strict=True)]
                for left, right in zip(rows[::2], rows[1::2], strict=True)
            ]
        for tensor, total in zip(tensors, rows[0], strict=True):
            tensor.copy_(total)


def on_ranks(size: int, shards: int, work: Callable[[ThreadTeam], T]) -> list[T]:
    """The results of `work` on every rank."""
    places, barrier = [None] * size, threading.Barrier(size)

    def one(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return work(ThreadTeam(rank, size, shards, places, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as executor:
        return list(executor.map(one, range(size)))
