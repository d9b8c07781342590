"""The sandboxes of this machine, for tests of programs that run in them."""

import contextlib
import os
import time
from functools import cache
from pathlib import Path

import pytest

from covey.llm.rewards.sandbox import supervisor
from covey.llm.rewards.sandbox.backends import CANDIDATES, try_backend
from covey.llm.rewards.sandbox.session import Sandbox, SandboxFailure

BACKENDS = sorted(CANDIDATES)
NAME = supervisor.__name__.encode()


@cache
def _tried(name: str) -> Sandbox | str:
    try:
        return try_backend(name)
    except SandboxFailure as error:
        return str(error)


def backend(name: str) -> Sandbox:
    """The backend of this name; skips the test if this machine has none that works."""
    found = _tried(name)
    if isinstance(found, str):
        pytest.skip(f"{name}: {found}")
    return found


def any_backend() -> Sandbox:
    """The first backend that works; skips the test if there is none."""
    for name in CANDIDATES:
        found = _tried(name)
        if not isinstance(found, str):
            return found
    pytest.skip("no sandbox on this machine")


def is_running(process: int) -> bool:
    """True if the process has not ended; the one that must wait for it may not have done so yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(ancestor: int) -> list[int]:
    """Processes below this one."""
    below: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{ancestor}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                below += [int(child) for child in (thread / "children").read_text().split()]
    return below + [process for child in below for process in descendants(child)]


def workers() -> list[int]:
    """Processes in which sandboxes of this test process start programs."""
    found = []
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError, IndexError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
            found += descendants(process)[:1] if NAME in words and parent == str(os.getpid()) else []
    return found


def processes_left(seconds: float = 5.0) -> list[str]:
    """Processes of sandboxes of this test process that have not ended after a while, apart from the workers."""
    deadline = time.monotonic() + seconds
    while True:
        left = []
        for process in {process for worker in workers() for process in descendants(worker)}:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
                left += [words[:200].decode("utf-8", "replace")] * is_running(process)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
