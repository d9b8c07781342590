"""An asyncio event loop in a thread of its own, so that requests run while the caller waits or computes."""

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines in the background until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._futures: set[Future[Any]] = set()
        self.at_close: set[Callable[[], Coroutine[Any, Any, None]]] = set()  # what ends the things that it serves
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine; returns the future of its result, which can be cancelled."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, which is cancelled if this thread is interrupted."""
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if not self._thread.is_alive():
            return
        for future in list(self._futures):
            future.cancel()
        for end in list(self.at_close):
            self.run(end())
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _settle(self) -> None:
        """Wait for the tasks that were cancelled. Those within them are ended by them: a library may not expect it."""
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)


def background() -> EventLoop:
    """The event loop of this process; a fork has another one."""
    return _loop_of(os.getpid())


@cache  # that of a parent cannot be closed
def _loop_of(process: int) -> EventLoop:
    loop = EventLoop()
    atexit.register(loop.close)
    return loop
