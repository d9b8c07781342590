"""The sandboxes of this machine, for tests of programs that run in them."""

from __future__ import annotations

import contextlib
import time
from functools import cache
from pathlib import Path

import pytest

from covey.llm.rewards.sandbox.backends import CANDIDATES, try_backend
from covey.llm.rewards.sandbox.command import MARK
from covey.llm.rewards.sandbox.sandlock_launcher import LAUNCHER
from covey.llm.rewards.sandbox.session import Sandbox, SandboxFailure
from covey.llm.rewards.sandbox.watchdog import marked_processes

BACKENDS = sorted(CANDIDATES)


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


def _supervisors() -> list[str]:
    """Children of the launcher of sandlock. Each ends after its program and all descendants of it."""
    launcher = LAUNCHER.process.pid if LAUNCHER.process else 0
    try:
        return Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except OSError:
        return []


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


def processes_left(seconds: float = 5.0) -> list[str]:
    """Sandbox processes of this test process that have not ended after a while: command lines, and supervisors' ids."""
    deadline = time.monotonic() + seconds
    while True:
        left = _supervisors()
        for process in marked_processes(MARK.encode()):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if not any(word.endswith(b"watchdog.py") for word in words):
                    left.append(b" ".join(words)[:200].decode("utf-8", "replace"))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
