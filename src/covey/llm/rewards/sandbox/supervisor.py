"""Starts and supervises programs in a sandbox: the service of a worker (`runtime/worker`), one fork for each program.

    the run  <-- requests and replies -->  this fork  <-- stdin, stdout, stderr -->  the harness in the sandbox

The fork adopts orphans and ends all descendants of its program, and the worker's supervisor those of all forks, also if
the run's process is killed. So a backend needs no process namespace. The fork passes frames on and does not read them;
it cuts output while it reads it.

This file imports little of the standard library, so that forks are quick. It imports the package sandlock, if that is
the backend, in the worker, because this takes longer than everything else.
"""

from __future__ import annotations

import base64
import contextlib
import marshal
import os
import selectors
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from typing import Any

from covey.runtime.worker.child import Message, adopt_orphans, end_descendants, ending, one_printable_line

MOST_STDERR_BYTES = 1 << 20
STDERR_TAIL_BYTES = 2000
LONGEST_LINE = 200  # characters of stderr in a message


def begin(backend: Message) -> tuple[Message, Callable[[Message], Program]]:
    """Prepare a backend (`backends.Sandbox`); returns what makes a program from its settings."""
    os.chdir("/")
    if backend["policy"] is not None:
        warnings.simplefilter("ignore")  # of its own field gid
        import sandlock  # noqa: F401
    return {}, lambda settings: Program(backend, settings)


class Fault(Exception):
    """The program broke a limit, ended by itself or sent something that is not a reply."""


class Program:
    """A program, which the first request starts and the request `end` ends. The replies to others have a `fault`, the
    next `frame`, or with `rest`, which is the last input, what the program `printed` until it ended.
    """

    def __init__(self, backend: Message, settings: Message) -> None:
        self._backend, self._settings = backend, settings
        self._process: Any = None
        self._folder = ""
        self._most = 0
        self._output, self._errors, self._errors_count = bytearray(), b"", 0
        self._input = memoryview(b"")
        self._is_last = self._has_ended = False
        self._code = 0
        self._selector = selectors.DefaultSelector()

    def __call__(self, request: Message) -> Message:
        if "end" in request:
            return {"ended": self._end()}
        self._most = request["most"]
        try:
            if self._process is None:
                self._start()
            if "frame" in request:
                self._send(request["frame"], request.get("rest"))
            if "rest" in request:
                return {"printed": base64.b64encode(self._printed(request["seconds"])).decode()}
            return {"frame": self._next_frame(request["seconds"]).decode("latin-1")}
        except (Fault, TimeoutError) as error:
            said = "" if "frame" in request else self._last_line()  # the reason why it did not start
            fault = {"fault": said or str(error), "late": isinstance(error, TimeoutError)}
            return fault | {"printed": base64.b64encode(self._output).decode()}

    def _start(self) -> None:
        adopt_orphans()
        command = [*self._backend["command"], marshal.dumps(self._settings["harness"]).hex()]
        if self._backend["policy"] is not None:
            import sandlock

            policy = self._backend["policy"] | self._settings["policy"]
            self._process = sandlock.Sandbox(**policy).popen(command, *[sandlock.StdioMode.PIPED] * 3)
        else:
            if self._backend["folder"]:
                self._folder = os.path.join(self._backend["folder"], f"covey_program_{os.urandom(8).hex()}")
                os.mkdir(self._folder, 0o700)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
                cwd=self._folder or None,
                start_new_session=True,
            )
        self._end_of_process = os.pidfd_open(self._process.pid)
        for source, read in (
            (self._process.stdout.fileno(), self._read_output),
            (self._process.stderr.fileno(), self._read_errors),
            (self._end_of_process, self._notice_end),
        ):
            os.set_blocking(source, False)
            self._selector.register(source, selectors.EVENT_READ, read)
        os.set_blocking(self._process.stdin.fileno(), False)

    def _end(self) -> bool:
        """End every process; False if one is left."""
        if self._process is not None and not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end_of_process, signal.SIGKILL)
        ended = end_descendants(patience=0.05)
        if self._folder:
            import shutil

            shutil.rmtree(self._folder, ignore_errors=True)
        return ended

    def _send(self, frame: Any, rest: str | None) -> None:
        payload = marshal.dumps(frame)
        self._is_last = rest is not None
        self._input = memoryview(
            bytes(self._input) + len(payload).to_bytes(4, "big") + payload + base64.b64decode(rest or "")
        )
        stdin = self._process.stdin
        if not stdin.closed and stdin.fileno() not in self._selector.get_map():
            self._selector.register(stdin.fileno(), selectors.EVENT_WRITE, self._write)

    def _next_frame(self, seconds: float) -> bytes:
        self._pump(seconds, lambda: self._has_ended or self._frame_end() is not None)
        end = self._frame_end()
        if end is None:
            raise Fault(self._how_it_ended())
        frame = bytes(self._output[4:end])
        del self._output[:end]
        return frame

    def _frame_end(self) -> int | None:
        if len(self._output) < 4:
            return None
        end = 4 + int.from_bytes(self._output[:4], "big")
        if end > 4 + self._most:
            raise Fault(f"returned more than {self._most >> 10} KiB, or something that is not a reply")
        return end if len(self._output) >= end else None

    def _printed(self, seconds: float) -> bytes:
        self._pump(seconds, lambda: self._has_ended)
        if self._code != 0:
            raise Fault(self._how_it_ended())
        return bytes(self._output)

    def _pump(self, seconds: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"took longer than {seconds:.3g} s")
            if done():
                return
            for key, _ in self._selector.select(left):
                key.data()

    def _write(self) -> None:
        stdin = self._process.stdin
        try:
            self._input = self._input[os.write(stdin.fileno(), self._input[: 1 << 16]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._input, self._is_last = memoryview(b""), True
        if not self._input:
            self._selector.unregister(stdin.fileno())
            if self._is_last:
                stdin.close()

    def _read_output(self) -> None:
        self._output += self._read(self._process.stdout.fileno())
        if len(self._output) > self._most + 4:
            raise Fault(f"printed more than {max(self._most >> 10, 1)} KiB")

    def _read_errors(self) -> None:
        read = self._read(self._process.stderr.fileno())
        self._errors = (self._errors + read)[-STDERR_TAIL_BYTES:]
        self._errors_count += len(read)
        if self._errors_count > MOST_STDERR_BYTES:
            raise Fault(f"printed more than {MOST_STDERR_BYTES >> 10} KiB")

    def _read(self, descriptor: int) -> bytes:
        try:
            read = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return b""
        if not read and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        return read

    def _notice_end(self) -> None:
        """The process ended: read what it left in the pipes, which processes that it started may still hold open."""
        self._selector.unregister(self._end_of_process)
        result = self._process.wait()
        self._code = result if isinstance(result, int) else _code_of(result)
        for read in (self._read_output, self._read_errors):
            before = -1
            while before != (before := len(self._output) + self._errors_count):
                read()
        self._has_ended = True

    def _last_line(self) -> str:
        lines = self._errors.decode("utf-8", "replace").strip().splitlines()
        return one_printable_line(lines[-1])[:LONGEST_LINE] if lines else ""

    def _how_it_ended(self) -> str:
        if self._code < 0 or self._code > 128:
            return ending(min(self._code, 128 - self._code))
        return (self._code and self._last_line()) or f"ended with exit code {self._code}"


def _code_of(result: Any) -> int:
    """The exit code in a result of sandlock."""
    if result.exit_code >= 0:
        return int(result.exit_code) & 0xFF
    return 128 + (result.signal if result.signal and result.signal > 0 else signal.SIGKILL)
