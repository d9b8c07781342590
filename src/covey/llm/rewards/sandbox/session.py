"""One sandboxed process as seen by the parent: frames, output that is cut while it is read, deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, Protocol

from covey.llm.rewards.reward_call import one_printable_line
from covey.llm.rewards.sandbox.limits import Limits

START_SECONDS = 60.0  # for a sandbox to report that it is ready, on a busy machine
END_SECONDS = 10.0  # for killed processes to disappear
MOST_STDERR_BYTES = 1 << 20
STDERR_TAIL_BYTES = 2000


class SandboxFailure(Exception):
    """The sandbox did not work, so the program is not judged; one line."""


class ProgramFault(Exception):
    """The program broke a limit, ended by itself or sent something that is no reply; one line."""


class TimeLimit(ProgramFault):
    """The program was still running at its deadline."""


class Launched(Protocol):
    """A started sandbox."""

    process: subprocess.Popen[bytes]

    def kill_all(self) -> None:
        """Kill every process of the sandbox, and return when none is left.

        Raises:
            SandboxFailure: if a process remains.
        """


class Sandbox(Protocol):
    """A way to start the harness in isolation."""

    name: str

    def launch(self, limits: Limits) -> Launched:
        """Start the harness with pipes as its stdin, stdout and stderr.

        Raises:
            SandboxFailure: if it cannot be started.
        """


class Session:
    """A harness in a sandbox, until `close`; a context manager.

    Raises:
        SandboxFailure: from the constructor, if the harness does not report that it is ready.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self.limits = limits
        self._launched = sandbox.launch(limits)
        self._process = process = self._launched.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._to_write = memoryview(b"")
        self._received, self._stderr, self._stderr_count = bytearray(), b"", 0
        self._last_input = False
        self._most_output = limits.output_bytes
        self._open = {process.stdout.fileno(), process.stderr.fileno()}
        self._selector = selectors.DefaultSelector()
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, self._read_stdout)
        self._selector.register(process.stderr, selectors.EVENT_READ, self._read_stderr)
        self._ended = os.pidfd_open(process.pid)
        self._selector.register(self._ended, selectors.EVENT_READ, self._notice_end)
        self._has_ended = False
        try:
            ready = self.receive(START_SECONDS)
        except ProgramFault:
            ready = {}
        except BaseException:
            self.close()
            raise
        if ready != {"ready": True}:
            self.close()
            raise SandboxFailure(f"the sandbox ({sandbox.name}) did not start: {self.last_words()}")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the sandbox."""
        self._selector.close()
        os.close(self._ended)
        try:
            self._launched.kill_all()
        finally:
            process = self._process
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def last_words(self) -> str:
        """The last line on stderr, or how the process ended."""
        lines = self._stderr.decode("utf-8", "replace").strip().splitlines()
        code = self._process.poll()
        said = one_printable_line(lines[-1])[:200] if lines else ""
        return said or (f"it ended with exit code {code}" if code is not None else "no answer")

    # ---- frames ----

    def send(self, message: dict[str, Any], rest: bytes | None = None) -> None:
        """Queue a frame; with `rest`, also the bytes after it, which are the last."""
        payload = json.dumps(message).encode()
        frame = bytes(self._to_write) + len(payload).to_bytes(4, "big") + payload + (rest or b"")
        self._to_write, self._last_input = memoryview(frame), rest is not None
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.closed and stdin.fileno() not in self._selector.get_map():
            self._selector.register(stdin, selectors.EVENT_WRITE, self._write_stdin)

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next frame.

        Raises:
            ProgramFault: at the deadline, if the process ended, or for anything else than a frame.
        """
        self._pump(time.monotonic() + seconds, seconds, lambda: self._frame_end() is not None or self._has_ended)
        end = self._frame_end()
        if end is None:
            raise ProgramFault(self._description_of_end())
        payload = bytes(self._received[4:end])
        del self._received[:end]
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ProgramFault("sent something that is no reply")
        return message

    def _frame_end(self) -> int | None:
        if len(self._received) < 4:
            return None
        length = int.from_bytes(self._received[:4], "big")
        if length > self._most_output:
            raise ProgramFault(f"returned more than {self._most_output >> 10} KiB, or something that is no reply")
        return 4 + length if len(self._received) >= 4 + length else None

    # ---- a script ----

    def run_script(self, source: str, stdin: bytes, most_output: int, prefix: str = "") -> bytes:
        """Run a program to its end; returns its stdout.

        Args:
            most_output: bytes of stdout after which the program is ended.

        Raises:
            ProgramFault: if it broke a limit, or its exit code is not 0.
        """
        self._most_output = most_output
        seconds = self.limits.seconds
        self.send({"mode": "script", "prefix": prefix, "source": source}, rest=stdin)
        self._pump(time.monotonic() + seconds, seconds, lambda: self._has_ended)
        if self._process.wait() != 0:
            raise ProgramFault(self._description_of_end())
        return bytes(self._received)

    # ---- the pipes ----

    def _pump(self, deadline: float, seconds: float, done: Callable[[], bool]) -> None:
        """Read and write until `done`; `seconds` is the limit that a message names."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeLimit(f"took longer than {seconds:g} s")
            for key, _ in self._selector.select(left):
                key.data()

    def _write_stdin(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        gone = False
        try:
            self._to_write = self._to_write[os.write(stdin.fileno(), self._to_write[: 1 << 16]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            gone, self._to_write = True, memoryview(b"")
        if not self._to_write:
            self._selector.unregister(stdin)
            if gone or self._last_input:
                stdin.close()

    def _read_stdout(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        self._received += self._read(stdout.fileno())
        if len(self._received) > self._most_output + 4:
            raise ProgramFault(f"printed more than {max(self._most_output >> 10, 1)} KiB")

    def _read_stderr(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        read = self._read(stderr.fileno())
        self._stderr = (self._stderr + read)[-STDERR_TAIL_BYTES:]
        self._stderr_count += len(read)
        if self._stderr_count > MOST_STDERR_BYTES:
            raise ProgramFault(f"printed more than {MOST_STDERR_BYTES >> 10} KiB")

    def _read(self, descriptor: int) -> bytes:
        try:
            read = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return b""
        if not read and descriptor in self._open:
            self._open.discard(descriptor)
            self._selector.unregister(descriptor)
        return read

    def _notice_end(self) -> None:
        """The process ended: read what it left in the pipes, which processes that it started may still hold open."""
        self._selector.unregister(self._ended)
        self._process.wait()
        for read in (self._read_stdout, self._read_stderr):
            before = -1
            while before != (before := len(self._received) + self._stderr_count):
                read()
        self._has_ended = True

    def _description_of_end(self) -> str:
        code = self._process.poll()
        lines = self._stderr.decode("utf-8", "replace").strip().splitlines()
        if code is not None and (code > 128 or code < 0):
            number = code - 128 if code > 0 else -code
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"was killed by {name}"
        return one_printable_line(lines[-1])[:200] if code and lines else f"ended with exit code {code}"
