"""Seconds that the phases of a training step take, by the name of their metric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Measure = Callable[[str], AbstractContextManager[None]]  # times what happens inside


class Clock:
    """Adds up the seconds of every phase. A phase may contain others."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.began


def untimed(name: str) -> AbstractContextManager[None]:
    """A `Measure` that measures nothing."""
    return nullcontext()
