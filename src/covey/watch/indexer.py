"""The process that writes the indexes, beside the server: `python -m covey.watch.indexer`.

A process of its own, because Python would otherwise share its time with the server's answers. It reads run folders from
its standard input, one path in JSON a line, brings the index of each up to date, and ends when the input ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from covey.watch.index import delete_unused, index_folder, index_path, update

NICENESS = 10
AGAIN_SECONDS = 1.0  # least time between two requests for the same run


class Indexer:
    """Starts the process when it is first needed, and asks it to index runs. A context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[Path, float] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Indexer:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.3)
                self._process.kill()
                self._process.wait()

    @property
    def wanted(self) -> set[Path]:
        """The run folders that were asked for."""
        return set(self._asked)

    def ask(self, run_dir: Path) -> None:
        """Have the index of a run brought up to date. A process that has died is started again."""
        with self._lock:
            if time.monotonic() - self._asked.get(run_dir, float("-inf")) < AGAIN_SECONDS:
                return
            self._asked[run_dir] = time.monotonic()
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "covey.watch.indexer"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.write(json.dumps(os.fsdecode(run_dir)).encode() + b"\n")
                self._process.stdin.flush()


def main() -> None:
    """Index the runs that the standard input names, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which closes the input
    with suppress(OSError):
        os.nice(NICENESS)
    asked: queue.SimpleQueue[Path] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    delete_unused(index_folder())
    waiting: list[Path] = []
    while True:
        if not waiting:
            waiting.append(asked.get())
        run_dir = waiting.pop()
        with suppress(OSError, sqlite3.Error):
            for _ in update(run_dir, index_path(run_dir)):
                newer = _drain(asked)
                if any(path != run_dir for path in newer):  # what was asked for last comes first
                    waiting = [run_dir, *waiting, *newer]
                    break
                waiting += newer
        waiting = list(dict.fromkeys([*waiting, *_drain(asked)]))


def _read(asked: queue.SimpleQueue[Path]) -> None:
    for line in sys.stdin.buffer:
        with suppress(ValueError):
            asked.put(Path(json.loads(line)))
    os._exit(0)  # an index survives that, as its transactions do


def _drain(asked: queue.SimpleQueue[Path]) -> list[Path]:
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(asked.get_nowait())
    return found


if __name__ == "__main__":
    main()
