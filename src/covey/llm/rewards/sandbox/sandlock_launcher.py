"""Starts programs in sandlock by a process that has imported the package: the run's end of `sandlock_process.py`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import IO, Any

from covey.llm.rewards.sandbox import sandlock_process
from covey.llm.rewards.sandbox.pipes import is_readable
from covey.llm.rewards.sandbox.session import END_SECONDS, SandboxFailure
from covey.runtime.worker import child

ATTEMPTS = 2  # the launcher may have been killed since the last program


class Launcher:
    """The process that forks a supervisor for each program. It is started when it is needed and does not run."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._lock = threading.Lock()

    def launch(self, settings: dict[str, Any], seconds: float) -> SupervisedProgram:
        """Start a program.

        Args:
            settings: "policy", "command" and "limits" of `sandlock_process`.
            seconds: for the supervisor to report its process id.

        Raises:
            SandboxFailure: if there is no supervisor by then. OSError: without processes or descriptors.
        """
        deadline = time.monotonic() + seconds
        for _ in range(ATTEMPTS):
            program, theirs = _pipes()
            try:
                with self._lock:
                    self._send(json.dumps(settings).encode(), theirs, seconds)
            except BaseException:
                program.close()
                raise
            finally:
                for descriptor in theirs:
                    os.close(descriptor)
            if program.await_supervisor(max(deadline - time.monotonic(), 0.0)):
                return program
            program.close()
            with self._lock, contextlib.suppress(subprocess.TimeoutExpired):
                if self.process is not None:
                    self.process.wait(0.1)
        raise SandboxFailure("sandlock's launcher started no supervisor")

    def _send(self, settings: bytes, descriptors: list[int], seconds: float) -> None:
        if self._requests is None or self.process is None or self.process.poll() is not None:
            self.close()
            self._start()
        assert self._requests is not None
        self._requests.settimeout(seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed, because no supervisor reports
            socket.send_fds(self._requests, [settings], descriptors)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [sandlock_process.__file__, child.__file__, str(theirs.fileno())]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-W", "ignore", *arguments],  # it warns of its own field gid
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._requests = ours

    def close(self) -> None:
        """End the launcher, which ends at the end of its requests; programs that run go on."""
        if self._requests is not None:
            self._requests.close()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        self._requests = self.process = None


LAUNCHER = Launcher()
atexit.register(LAUNCHER.close)


def _pipes() -> tuple[SupervisedProgram, list[int]]:
    """A program's pipes and the socket to its supervisor: our ends, and the descriptors for the supervisor."""
    ours, theirs = socket.socketpair()
    made: list[int] = [theirs.detach()]
    try:
        pairs = []
        for _ in range(3):
            pairs.append(os.pipe())
            made += pairs[-1]
    except OSError:
        ours.close()
        for descriptor in made:
            os.close(descriptor)
        raise
    (their_in, our_in), (our_out, their_out), (our_err, their_err) = pairs
    streams = (os.fdopen(our_in, "wb", 0), os.fdopen(our_out, "rb", 0), os.fdopen(our_err, "rb", 0))
    return SupervisedProgram(ours, *streams), [their_in, their_out, their_err, made[0]]


@dataclass
class SupervisedProgram:
    """A program under a supervisor, as `Launched` and as `Process` with the exit code that the supervisor sends."""

    run: socket.socket
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    supervisor: int | None = None
    _code: int | None = field(default=None, init=False)

    def await_supervisor(self, seconds: float) -> bool:
        """True if the supervisor reports its process id in this time."""
        self.run.settimeout(seconds)
        with contextlib.suppress(OSError):
            sent = self.run.recv(4, socket.MSG_WAITALL)
            if len(sent) == 4:
                self.supervisor = int.from_bytes(sent, "big")
        self.run.setblocking(True)
        return self.supervisor is not None

    @property
    def process(self) -> SupervisedProgram:
        return self

    def poll(self) -> int | None:
        """The exit code, or None while the supervisor runs."""
        return self.wait() if self._code is not None or is_readable(self.run.fileno(), 0) else None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, after the supervisor's end.

        Raises:
            TimeoutError: if it has not ended in time.
        """
        if self._code is None:
            self.run.settimeout(timeout)
            sent = b""
            while part := self.run.recv(16):
                sent += part
            self._code = sent[0] if sent else 128 + signal.SIGKILL
        return self._code

    def end_descriptor(self) -> int:
        """A descriptor that is readable once the supervisor has sent the exit code or has ended."""
        return os.dup(self.run.fileno())

    def kill_all(self) -> None:
        """Let the supervisor end its descendants and itself."""
        with contextlib.suppress(OSError):  # it has ended
            self.run.shutdown(socket.SHUT_WR)
        try:
            self.wait(2 * child.END_SECONDS)
        except TimeoutError:
            if self.supervisor is not None:
                os.kill(self.supervisor, signal.SIGKILL)
            raise SandboxFailure("the supervisor of a program could not be ended") from None
        finally:
            self.run.close()

    def close(self) -> None:
        """Give the program up before it was supervised."""
        for end in (self.run, self.stdin, self.stdout, self.stderr):
            end.close()
