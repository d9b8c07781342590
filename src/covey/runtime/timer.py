"""Times the phases of a training step, in seconds by the name of the metric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Measure = Callable[[str], AbstractContextManager[None]]  # returns a context manager that times its block


class Clock:
    """Sums the seconds of every phase. Phases may be nested."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def total(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self.began


def untimed(name: str) -> AbstractContextManager[None]:
    """A `Measure` that measures nothing."""
    return nullcontext()
