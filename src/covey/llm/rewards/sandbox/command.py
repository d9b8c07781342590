"""The command line of the harness, and the watchdog of the processes that are started with it."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from covey.llm.rewards.sandbox import watchdog
from covey.llm.rewards.sandbox.interpreter import Interpreter
from covey.llm.rewards.sandbox.limits import MOST_FILE_BYTES, MOST_OPEN_FILES, Limits


MARK = f"covey-{secrets.token_hex(12)}"  # in the command line of every process of this process's sandboxes


@lru_cache(maxsize=1)
def start_watchdog() -> subprocess.Popen[bytes]:
    """Start the process that ends marked processes after this one has ended; once."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", watchdog.__file__, MARK],
        stdin=subprocess.PIPE,  # kept open until this process ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )


@lru_cache(maxsize=1)
def harness_source() -> str:
    """The text of harness.py, which is passed as an argument, so that the sandbox needs no file of covey."""
    return Path(__file__).with_name("harness.py").read_text(encoding="utf-8")


def harness_command(
    interpreter: Interpreter, limits: Limits, *, uid: int | None = None, processes: int | None
) -> list[str]:
    """The command that runs the harness; starts the watchdog too.

    Args:
        uid: user and group id to which the harness changes; None: it keeps its own.
        processes: RLIMIT_NPROC; None: it stays as it is, where it would count all processes of the user.
    """
    start_watchdog()
    settings = {
        "mark": MARK,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_mb << 20,
        "file_bytes": MOST_FILE_BYTES,
        "open_files": MOST_OPEN_FILES,
        "processes": processes,
        "uid": uid,
    }
    return interpreter.arguments(harness_source(), json.dumps(settings))
