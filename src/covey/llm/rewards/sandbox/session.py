"""One sandboxed process as seen by the run: frames to and from the harness, and its end."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

from covey.llm.rewards.sandbox import supervisor
from covey.llm.rewards.sandbox.harness import DEEPEST
from covey.runtime.worker import child
from covey.runtime.worker.child import InvalidResult, Message
from covey.runtime.worker.process import CallError
from covey.runtime.worker.sessions import Sessions

LOAD_SECONDS = 60.0  # for the worker of a backend to start
SPARE_SECONDS = 10.0  # for the reply of a supervisor that ends its program at a deadline
RESOURCES = {  # of each process of a program, as names of RLIMIT_ constants
    "RLIMIT_CORE": 0,
    "RLIMIT_FSIZE": 1 << 24,  # for a backend in which a program can write at all
    "RLIMIT_NOFILE": 64,
    "RLIMIT_MEMLOCK": 0,
    "RLIMIT_MSGQUEUE": 0,
    "RLIMIT_SIGPENDING": 64,
    "RLIMIT_RTPRIO": 0,
}


class SandboxFailure(Exception):
    """The sandbox did not work, so the program is not judged; one line."""


class ProgramFault(Exception):
    """The program broke a limit, ended by itself or sent something that is not a reply; one line."""

    printed = b""  # before


class TimeLimit(ProgramFault):
    """The program was still running at its deadline."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. The processor and memory limits hold for each of its processes."""

    seconds: float = 5.0  # wall time of one case
    cpu_seconds: int = 6  # processor time of a process
    memory_mb: int = 256  # address space of a process
    processes: int = 4  # processes and threads together, the first included
    output_bytes: int = 1 << 20  # printed to each of stdout and stderr, and of one reply
    start_seconds: float = 60.0  # for the sandbox to report that it is ready, on a busy machine


@dataclass
class Sandbox:
    """A way to start the harness in isolation.

    Args:
        name: of the backend.
        command: starts the harness; its settings in JSON are added as the last argument.
        policy: of sandlock, which runs the command and limits memory and processes; None: the harness limits them.
        path: `sys.path` of the worker; empty: its own.
        processes: of the backend that count as the program's (RLIMIT_NPROC); None: the harness does not limit them,
            because the limit would count all processes of the user.
        next_uid: makes a user and group id for a program; None: it keeps those of the run.
        folder: in which each program has a working folder; empty: it needs none.
    """

    name: str
    command: Sequence[str]
    policy: Mapping[str, Any] | None = None
    path: Sequence[str] = ()
    processes: int | None = None
    next_uid: Callable[[], int] | None = None
    folder: str = ""

    @cached_property
    def sessions(self) -> Sessions:
        """Starts the programs."""
        backend = {"command": self.command, "policy": self.policy, "path": self.path, "folder": self.folder}
        return Sessions(supervisor, lambda: backend, LOAD_SECONDS, LOAD_SECONDS, environment={})

    def settings(self, limits: Limits) -> Message:
        """Of one program: for the harness, and what is added to sandlock's policy."""
        numbers = RESOURCES | {"RLIMIT_CPU": limits.cpu_seconds}
        if self.policy is None:
            numbers["RLIMIT_AS"] = limits.memory_mb << 20
        if self.processes is not None:
            numbers["RLIMIT_NPROC"] = limits.processes + self.processes
        uid = None if self.next_uid is None else self.next_uid()
        policy = {"max_processes": limits.processes, "max_memory": f"{limits.memory_mb}M"}
        return {"harness": {"uid": uid, "limits": numbers}, "policy": policy}


class Session:
    """A harness in a sandbox, until `close`; a context manager.

    Raises:
        SandboxFailure: from the constructor, if the harness does not report that it is ready. OSError: without
            descriptors.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self.limits = limits
        did_not_start = f"the sandbox ({sandbox.name}) did not start"
        try:
            self._program = sandbox.sessions.open(sandbox.settings(limits))
        except CallError as error:
            raise SandboxFailure(f"{did_not_start}: {error}") from None
        try:
            if self.ask(None, limits.start_seconds) != {"ready": True}:
                raise ProgramFault("it sent something else than that it is ready")
        except (ProgramFault, SandboxFailure) as error:
            self.close()
            raise SandboxFailure(f"{did_not_start}: {error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the sandbox.

        Raises:
            SandboxFailure: if one is left.
        """
        try:
            if not self._program.failed:
                ended = self._program.ask({"end": True}, child.END_SECONDS + SPARE_SECONDS).result()["ended"]
                if not ended:
                    raise SandboxFailure("a process of the sandbox could not be ended")
        except CallError as error:
            raise SandboxFailure(f"a program could not be ended: {error}") from None
        finally:
            self._program.close()

    def ask(self, frame: Message | None, seconds: float) -> Message:
        """Send a frame, unless it is None; returns the next frame of the harness.

        Raises:
            ProgramFault: at the deadline, if the process ended, or for anything else than a frame.
            SandboxFailure: if the supervisor ended.
        """
        request = {} if frame is None else {"frame": frame}
        reply = self._ask(request, seconds, self.limits.output_bytes)["frame"]
        try:
            message = json.loads(reply.encode("latin-1"))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not _is_flat(message):
            raise ProgramFault("sent something that is not a reply")
        return message

    def run_script(
        self, source: str, stdin: bytes, most_output: int, prefix: str = "", seconds: float | None = None
    ) -> bytes:
        """Run a program to its end; returns its stdout.

        Args:
            most_output: bytes of stdout after which the program is ended.
            prefix: source text before the program.
            seconds: wall time after which it is ended; None: that of the limits.

        Raises:
            ProgramFault: if it broke a limit, or its exit code is not 0.
        """
        frame = {"mode": "script", "prefix": prefix, "source": source}
        request = {"frame": frame, "rest": base64.b64encode(stdin).decode()}
        reply = self._ask(request, self.limits.seconds if seconds is None else seconds, most_output)
        return base64.b64decode(reply["printed"])

    def _ask(self, request: Message, seconds: float, most: int) -> Message:
        try:
            asked = self._program.ask(request | {"seconds": seconds, "most": most}, seconds + SPARE_SECONDS)
            reply = asked.result()
        except (CallError, InvalidResult) as error:
            raise SandboxFailure(str(error)) from None
        except BaseException:  # Ctrl-C: the reply is still to come, so `close` cannot ask for the end
            self._program.failed = "the run was interrupted"
            raise
        if "fault" in reply:
            fault = (TimeLimit if reply["late"] else ProgramFault)(reply["fault"])
            fault.printed = base64.b64decode(reply["printed"])
            raise fault
        return reply


def _is_flat(message: Message) -> bool:
    """True if a frame has no more levels than those of the harness, so that it can be sent on."""
    level: list[Any] = [message]
    for _ in range(2 * DEEPEST):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
    return not level
