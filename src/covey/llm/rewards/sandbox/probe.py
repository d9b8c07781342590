"""Tries a sandbox with a program that attempts what it must prevent. A sandbox that fails is not used."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

from covey.llm.rewards.sandbox.harness import encode
from covey.llm.rewards.sandbox.session import Limits, ProgramFault, Sandbox, SandboxFailure, Session

PROBE_SECONDS = 60.0
START_SECONDS = 15.0  # of a candidate, which may be broken and never start
TRIED_PROCESSES = 40
_SECRET = "covey's secret outside of the sandbox"
_PROGRAM = '''
import ctypes, os, signal, socket

libc = ctypes.CDLL(None, use_errno=True)


def works(function, *arguments):
    try:
        return function(*arguments)
    except BaseException:
        return None


def read(path):
    with open(path, "rb") as file:
        return file.read()


def forks(count):
    children = []
    for _ in range(count):
        try:
            child = os.fork()
        except OSError:
            break
        if not child:
            signal.pause()
            os._exit(0)
        children.append(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(children)


def traces():
    child = os.fork()
    if not child:
        os._exit(libc.ptrace(0, 0, 0, 0) == 0)
    return os.waitpid(child, 0)[1] != 0


def connect(port):
    with socket.socket() as outgoing:
        outgoing.settimeout(1)
        outgoing.connect(("127.0.0.1", port))
    return True


def write(folder):
    path = os.path.join(folder, "covey_probe")
    with open(path, "w") as file:
        file.write("x")
    return True


def attempts(canary, folder, port, count, parent):
    """Names of the attempts that succeeded."""
    found = {
        "read a file of the host": works(read, canary),
        "saw the environment of the run": dict(os.environ) or works(read, "/proc/1/environ"),
        "wrote a file": any(works(write, path) for path in (folder, "/", "/tmp", "/dev/shm", "/var/tmp", ".")),
        "opened a connection": works(connect, port),
        "became root": os.getuid() != 0 and works(os.setuid, 0) is None and os.getuid() == 0,
        "made a user namespace": libc.unshare(0x10000000) == 0,
        "traced a process": traces(),
        "sent a signal to the run": not missing(parent),
        "started too many processes": forks(count) >= count,
    }
    return [name for name, success in found.items() if success]


def missing(process):
    """True if a signal cannot reach the process."""
    try:
        os.kill(process, 0)
    except OSError:
        return True
    return False
'''


def check_isolation(sandbox: Sandbox) -> None:
    """Run the attempts in a sandbox.

    Raises:
        SandboxFailure: if it does not start, or an attempt succeeds; one line.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="covey_probe_"))
        os.chmod(folder, 0o777)
        canary = Path(folder, "secret")
        canary.write_text(_SECRET)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        session = stack.enter_context(Session(sandbox, Limits(seconds=PROBE_SECONDS, start_seconds=START_SECONDS)))
        arguments = [str(canary), folder, listener.getsockname()[1], TRIED_PROCESSES, os.getpid()]
        try:
            reply = session.ask({"mode": "functions", "prefix": "", "source": _PROGRAM}, PROBE_SECONDS)
            if "loaded" in reply:
                call = {"function": "attempts", "args": encode(arguments), "kwargs": encode({})}
                reply = session.ask(call, PROBE_SECONDS)
        except ProgramFault as error:
            raise SandboxFailure(f"its test program {error}") from None
        found = reply.get("value")
        if not isinstance(found, list):
            raise SandboxFailure(f"its test program failed: {reply.get('error')!r:.200}")
        if found != ["list"]:
            raise SandboxFailure(f"a test program in it {', '.join(map(str, found[1:]))}")
