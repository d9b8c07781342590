"""The process that writes the indexes, beside the server: `python -P -m covey.watch.indexer`.

A process of its own, because Python would otherwise share its time with the server's answers. It reads run folders from
its standard input, one in JSON a line, brings the index of each up to date, and ends when the input ends.
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
Task = tuple[Path, bool]  # a run folder, and True if its texts are indexed too
AGAIN_SECONDS = 1.0  # least time between two requests for the same run


class Indexer:
    """Starts the process when it is first needed, and asks it to index runs. A context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[Path, float] = {}  # run folder -> when it was asked for
        self._searched: set[Path] = set()  # those whose texts were asked for
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

    def ask(self, run_dir: Path, *, texts: bool = False) -> None:
        """Have the index of a run brought up to date. A process that has died is started again.

        Args:
            texts: index the texts too, from now on.
        """
        with self._lock:
            if texts and run_dir not in self._searched:
                self._searched.add(run_dir)
                self._asked.pop(run_dir, None)
            if time.monotonic() - self._asked.get(run_dir, float("-inf")) < AGAIN_SECONDS:
                return
            self._asked[run_dir] = time.monotonic()
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "covey.watch.indexer"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            assert self._process.stdin is not None
            with suppress(OSError):
                line = json.dumps([os.fsdecode(run_dir), run_dir in self._searched])
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()


def main() -> None:
    """Index the runs that the standard input names, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which closes the input
    with suppress(OSError):
        os.nice(NICENESS)
    asked: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    delete_unused(index_folder())
    waiting: list[Task] = []
    while True:
        waiting = list(dict.fromkeys([*waiting, *_drain(asked)])) or [asked.get()]
        task = run_dir, texts = waiting.pop()  # what was asked for last comes first
        with suppress(OSError, sqlite3.Error):
            for _ in update(run_dir, index_path(run_dir), texts=texts):
                newer = [other for other in _drain(asked) if other != task]
                if newer:
                    waiting += [task, *newer]
                    break


def _read(asked: queue.SimpleQueue[Task]) -> None:
    for line in sys.stdin.buffer:
        with suppress(ValueError, TypeError):
            name, texts = json.loads(line)
            asked.put((Path(name), bool(texts)))
    os._exit(0)  # an index survives that, as its transactions do


def _drain(asked: queue.SimpleQueue[Task]) -> list[Task]:
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(asked.get_nowait())
    return found


if __name__ == "__main__":
    main()
