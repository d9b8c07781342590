"""The pipes of one sandboxed process: written and read side by side under a deadline, output cut while it is read."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import time
from collections.abc import Callable
from typing import IO, Protocol

from covey.runtime.worker.child import ending, one_printable_line

MOST_STDERR_BYTES = 1 << 20
STDERR_TAIL_BYTES = 2000
LONGEST_LINE = 200  # characters of stderr in a message


def is_readable(descriptor: int, seconds: float) -> bool:
    """True if a descriptor is readable within this time; `select.select` fails for descriptors above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


class ProgramFault(Exception):
    """The program broke a limit, ended by itself or sent something that is not a reply; one line."""


class TimeLimit(ProgramFault):
    """The program was still running at its deadline."""


class Process(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def stderr(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, after the end."""


class Pipes:
    """Stdin, stdout and stderr of a process.

    `received` has what was read from stdout and not taken yet. Reading more than `most_output` bytes of stdout, or a
    MiB of stderr, raises ProgramFault.
    """

    def __init__(self, process: Process, end_descriptor: int, most_output: int) -> None:
        """Read and write the pipes of a process.

        Args:
            end_descriptor: readable once the process has ended; `close` closes it.
        """
        self.process, self.most_output = process, most_output
        self.received, self.has_ended = bytearray(), False
        self._stderr, self._stderr_count = b"", 0
        self._to_write, self._last_input = memoryview(b""), False
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin, self._stdout, self._stderr_end = process.stdin, process.stdout.fileno(), process.stderr.fileno()
        self._ended = end_descriptor
        try:
            self._selector = selectors.DefaultSelector()
        except OSError:
            os.close(end_descriptor)
            raise
        for descriptor in (self._stdin.fileno(), self._stdout, self._stderr_end):
            os.set_blocking(descriptor, False)
        self._selector.register(self._stdout, selectors.EVENT_READ, self._read_stdout)
        self._selector.register(self._stderr_end, selectors.EVENT_READ, self._read_stderr)
        self._selector.register(self._ended, selectors.EVENT_READ, self._notice_end)

    def close(self) -> None:
        """Close the pipes; the process is not ended."""
        self._selector.close()
        os.close(self._ended)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def write(self, text: bytes, *, last: bool = False) -> None:
        """Queue bytes for stdin; after the last ones it is closed."""
        self._to_write, self._last_input = memoryview(bytes(self._to_write) + text), last
        if not self._stdin.closed and self._stdin.fileno() not in self._selector.get_map():
            self._selector.register(self._stdin.fileno(), selectors.EVENT_WRITE, self._write_stdin)

    def pump(self, seconds: float, done: Callable[[], bool]) -> None:
        """Read and write until `done`.

        Raises:
            TimeLimit: after `seconds`. ProgramFault: for too much output.
        """
        deadline = time.monotonic() + seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeLimit(f"took longer than {seconds:.3g} s")
            for key, _ in self._selector.select(left):
                key.data()

    def last_line(self) -> str:
        """The last line on stderr."""
        lines = self._stderr.decode("utf-8", "replace").strip().splitlines()
        return one_printable_line(lines[-1])[:LONGEST_LINE] if lines else ""

    def description_of_end(self) -> str:
        """How the process ended, for the user."""
        code = self.process.poll()
        if code is not None and (code > 128 or code < 0):
            return ending(128 - code if code > 0 else code)
        return (code and self.last_line()) or f"ended with exit code {code}"

    def _write_stdin(self) -> None:
        gone = False
        try:
            self._to_write = self._to_write[os.write(self._stdin.fileno(), self._to_write[: 1 << 16]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            gone, self._to_write = True, memoryview(b"")
        if not self._to_write:
            self._selector.unregister(self._stdin.fileno())
            if gone or self._last_input:
                self._stdin.close()

    def _read_stdout(self) -> None:
        self.received += self._read(self._stdout)
        if len(self.received) > self.most_output + 4:
            raise ProgramFault(f"printed more than {max(self.most_output >> 10, 1)} KiB")

    def _read_stderr(self) -> None:
        read = self._read(self._stderr_end)
        self._stderr = (self._stderr + read)[-STDERR_TAIL_BYTES:]
        self._stderr_count += len(read)
        if self._stderr_count > MOST_STDERR_BYTES:
            raise ProgramFault(f"printed more than {MOST_STDERR_BYTES >> 10} KiB")

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
        self._selector.unregister(self._ended)
        self.process.wait()
        for read in (self._read_stdout, self._read_stderr):
            before = -1
            while before != (before := len(self.received) + self._stderr_count):
                read()
        self.has_ended = True
