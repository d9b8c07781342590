"""The command line of the harness, and the watchdog of the processes that are started with it."""

from __future__ import annotations

import atexit
import contextlib
import json
import secrets
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from covey.llm.rewards.sandbox import watchdog
from covey.llm.rewards.sandbox.interpreter import Interpreter
from covey.llm.rewards.sandbox.limits import MOST_FILE_BYTES, MOST_OPEN_FILES, Limits

END_SECONDS = 2 * watchdog.SECONDS  # for the watchdog to end after its stdin
MARK = f"covey-{secrets.token_hex(12)}"  # in the command line of every process of this process's sandboxes


@lru_cache(maxsize=1)
def start_watchdog() -> subprocess.Popen[bytes]:
    """Start the process that ends marked processes after this one has ended; once."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", watchdog.__file__, MARK],
        stdin=subprocess.PIPE,  # kept open until this process ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    atexit.register(_end_watchdog, process)
    return process


def _end_watchdog(process: subprocess.Popen[bytes]) -> None:
    """Let the watchdog do its work, and wait for its end, so that a normal end of this process leaves no child."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


@lru_cache(maxsize=1)
def harness_source() -> str:
    """The text of harness.py, which is passed as an argument, so that the sandbox needs no file of covey."""
    return Path(__file__).with_name("harness.py").read_text(encoding="utf-8")


def resource_limits(limits: Limits) -> dict[str, int]:
    """The limits of each process, as the names of RLIMIT_ constants; without those of memory and processes."""
    return {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_FSIZE": MOST_FILE_BYTES,
        "RLIMIT_NOFILE": MOST_OPEN_FILES,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 64,
        "RLIMIT_RTPRIO": 0,
    }


def harness_command(
    interpreter: Interpreter,
    limits: Limits | None,
    *,
    uid: int | None = None,
    processes: int | None,
    system_calls: bytes = b"",
) -> list[str]:
    """The command that runs the harness; starts the watchdog too.

    Args:
        limits: that the harness sets; None: the backend does.
        uid: user and group id to which the harness changes; None: it keeps its own.
        processes: RLIMIT_NPROC; None: it stays as it is, where it would count all processes of the user.
        system_calls: the filter of them (`seccomp.bpf_filter`); empty: none.
    """
    start_watchdog()
    numbers = {} if limits is None else resource_limits(limits) | {"RLIMIT_AS": limits.memory_mb << 20}
    if processes is not None:
        numbers["RLIMIT_NPROC"] = processes
    settings = {"mark": MARK, "uid": uid, "limits": numbers, "system_calls": system_calls.hex()}
    return interpreter.arguments(harness_source(), json.dumps(settings))
