"""The sandboxes of this machine, for tests of programs that run in them."""

from __future__ import annotations

import contextlib
import time
from functools import cache
from pathlib import Path

import pytest

from covey.llm.rewards.sandbox.backends import CANDIDATES, try_backend
from covey.llm.rewards.sandbox.command import MARK
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


def processes_left(seconds: float = 5.0) -> list[str]:
    """Command lines of sandbox processes of this test process, after waiting for the watchdog's own only."""
    deadline = time.monotonic() + seconds
    while True:
        left = []
        for process in marked_processes(MARK.encode()):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if not any(word.endswith(b"watchdog.py") for word in words):
                    left.append(b" ".join(words)[:200].decode("utf-8", "replace"))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
