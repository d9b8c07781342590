"""Server-sent events: what has changed in the runs since the last look."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from covey.watch.index import index_path, progress
from covey.watch.indexer import Indexer
from covey.watch.library import Library

LOOK_SECONDS = 1.0  # between two looks at the files
LOAD = 0.05  # fraction of the time that looking may take; with many runs there are fewer looks
STOP_SECONDS = 0.2  # after which a stream notices that the server ends
HEARTBEAT_SECONDS = 15.0
MOST_STREAMS = 50

State = dict[tuple[str, str], dict[str, Any]]  # (event, id of the run) -> its data


class Events:
    """Looks at the runs while somebody listens, once for all listeners."""

    def __init__(self, library: Library, indexer: Indexer, is_ending: Callable[[], bool]) -> None:
        self._library, self._indexer, self._is_ending = library, indexer, is_ending
        self._state: State = {}
        self._lock = asyncio.Lock()
        self._next_look = 0.0
        self.streams = 0

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of one listener: all runs at once, then what changes."""
        sent: State = {}
        heard = time.monotonic()
        self.streams += 1
        try:
            yield b": covey watch\n\n"
            while not self._is_ending():
                state = await self._look()
                lines = [_event(name, data) for (name, id), data in state.items() if sent.get((name, id)) != data]
                lines += [_event("gone", {"id": id}) for name, id in sent.keys() - state.keys() if name == "run"]
                sent = state
                if lines or time.monotonic() - heard > HEARTBEAT_SECONDS:
                    heard = time.monotonic()
                    yield b"".join(lines) or b": still here\n\n"
                await asyncio.sleep(STOP_SECONDS)
        finally:
            self.streams -= 1

    async def _look(self) -> State:
        async with self._lock:
            if time.monotonic() >= self._next_look:
                began = time.monotonic()
                self._state = await asyncio.to_thread(self._read)
                now = time.monotonic()
                self._next_look = now + max(LOOK_SECONDS, (now - began) / LOAD)
            return self._state

    def _read(self) -> State:
        state: State = {}
        for run in self._library.runs():
            state["run", run.id] = run.progress()
            if run.folder in self._indexer.wanted:
                index = progress(run.folder, index_path(run.folder))
                if index["state"] != "ready":
                    self._indexer.ask(run.folder)
                state["index", run.id] = {"id": run.id, "index": index}
        return state


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
