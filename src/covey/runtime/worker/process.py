"""Starts the process of a user's code (`child.py`), exchanges requests and replies with it, and ends it.

The exchanges with all children run in the event loop of this process, so that callers may wait or go on.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from covey.runtime.event_loop import background
from covey.runtime.worker import child
from covey.runtime.worker.child import InvalidResult, Message, one_line, printable

MOST_OUTPUT_CHARACTERS = 1 << 18  # printed output of one call; the rest is left out
POLL_SECONDS = 0.002  # between looks for the end of a process


class CallError(Exception):
    """A call gave no result: the user's code raised, or its process ended; one line."""


class CallTimeout(CallError):
    """The call was still running at its deadline."""


class Worker:
    """A service in a child, which answers one call at a time.

    The child starts with the first call and again after it was ended. It ends at `close`, at any end of the run's
    process, and after a call that timed out, ended it or got an unexpected reply. A call that fails in a child that
    answered before is repeated once in a new one, because an earlier call may be the cause. A call that timed out is
    not repeated.

    Output of the user's code is printed to stderr.
    """

    def __init__(
        self,
        service: ModuleType,
        setup: Callable[[], Message],
        load_seconds: float,
        *,
        repeat: bool = True,
        field: str = "its timeout_seconds",
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Args:
            service: with `begin`, see `child.py`.
            setup: makes the first request. Its `path`, if it has one, becomes `sys.path`.
            load_seconds: deadline of the reply to it.
            repeat: repeat a call that fails in a child that answered before.
            field: that raises this deadline, for messages.
            environment: variables of the child.
        """
        self._service, self._setup, self.load_seconds = service, setup, load_seconds
        self._repeat, self._field, self._environment = repeat, field, environment
        self._lock = asyncio.Lock()
        self.child: Child | None = None

    def call(self, request: Message, seconds: float) -> Message:
        """As `ask`, and wait for the reply."""
        return background().run(self.ask(request, seconds))

    def close(self) -> None:
        """End the process and all processes that it started."""
        background().run(self.end())

    async def ask(self, request: Message, seconds: float) -> Message:
        """The reply to a request, under a deadline.

        Raises:
            CallError: if the user's code raised or its process ended. CallTimeout: at the deadline.
            InvalidResult: if the user's code returned something unusable.
        """
        async with self._lock:
            answered_before = self.child is not None and self._repeat
            try:
                return await self._ask_once(request, seconds)
            except CallTimeout:
                raise
            except CallError:
                if not answered_before:
                    raise
            await self.end()
            return await self._ask_once(request, seconds)

    async def start(self) -> Message:
        """Start the child; returns the reply to the first request. Errors as of `ask`."""
        setup = self._setup()
        self.child = await Child.start(self._service, self._environment)
        try:
            return await self._exchange(setup, self.load_seconds)
        except CallTimeout as error:
            raise CallError(f"cannot be loaded: importing its file {error}; raise {self._field}") from None
        except (CallError, InvalidResult) as error:
            await self.end()
            raise CallError(f"cannot be loaded: {error}") from None

    async def end(self) -> None:
        """As `close`."""
        child, self.child = self.child, None
        if child is not None:
            await child.end()

    async def _ask_once(self, request: Message, seconds: float) -> Message:
        if self.child is None:
            await self.start()
        return await self._exchange(request, seconds)

    async def _exchange(self, request: Message, seconds: float) -> Message:
        """Send a request and wait for its reply. On a failure the process is ended, because it may reply later."""
        assert self.child is not None
        child = self.child
        try:
            async with asyncio.timeout(seconds):
                reply = await child.connection.exchange(request)
        except TimeoutError:
            await self.end()
            raise CallTimeout(f"took longer than {seconds:g} s") from None
        except EOFError:
            await self.end()
            raise CallError(child.last_words()) from None
        except BaseException:
            await self.end()
            raise
        if reply["last"]:
            await self.end()
        return result_of(reply)


def result_of(reply: Message) -> Message:
    """A reply without failure.

    Raises:
        InvalidResult, CallError: as the reply says.
    """
    if "wrong" in reply:
        raise InvalidResult(reply["wrong"])
    if "failed" in reply:
        raise CallError(reply["failed"])
    return reply


class Connection:
    """A socket to a child: requests and replies, one line of JSON each."""

    def __init__(self, ours: socket.socket, output: Output) -> None:
        self.socket, self._output = ours, output
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, request: Mapping[str, Any]) -> Message:
        """The reply to a request.

        Raises:
            EOFError: if the other end is closed. CallError: if the request has no JSON, or something other than its
                reply came.
        """
        number = secrets.token_hex(8)
        line = as_line({**request, "id": number})
        self._output.left = MOST_OUTPUT_CHARACTERS
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self.socket, limit=child.MOST_REPLY_BYTES)
        reader, writer = self._streams
        answer = b""
        try:
            writer.write(line)
            await writer.drain()
            answer = await reader.readuntil()
        except OSError:
            raise EOFError from None
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError) as error:
            if isinstance(error, asyncio.IncompleteReadError) and not error.partial:
                raise EOFError from None
        with contextlib.suppress(ValueError, RecursionError):
            reply = json.loads(answer)
            if isinstance(reply, dict) and reply.get("id") == number:
                return reply
        raise CallError(
            "something other than a reply came from its process: a function must not write to files that it did not "
            "open"
        )

    def close(self) -> None:
        """Close the socket."""
        if self._streams is None:
            self.socket.close()
        else:
            self._streams[1].transport.abort()


def as_line(request: Mapping[str, Any]) -> bytes:
    """A request in JSON.

    Raises:
        CallError: if it cannot be written as JSON.
    """
    try:
        return json.dumps(request, default=_in_json).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CallError(f"its arguments cannot be sent to its process as JSON: {one_line(error)}") from None


def _in_json(value: Any) -> Any:
    """A number or array of NumPy or torch, in a column from Python, as numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class Child:
    """A started child: supervisor and worker, the connection to the worker, and the copy of its output."""

    def __init__(self, service: ModuleType, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.mark = secrets.token_hex(16)
        # Run by its path and with -P, so that neither the package nor its folder is imported by accident. In its own
        # session it does not receive the terminal's Ctrl-C.
        self.supervisor = subprocess.Popen(
            [sys.executable, "-P", child.__file__, str(theirs.fileno()), str(service.__file__), service.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            # With the same hashes in every process, a function that iterates over a set gives the same results again.
            env={**environment, child.MARK: self.mark, "PYTHONHASHSEED": "0"},
        )
        theirs.close()
        ours.setblocking(False)
        assert self.supervisor.stdout is not None
        self.output = Output(self.supervisor.stdout.fileno())
        self.connection = Connection(ours, self.output)

    @classmethod
    async def start(cls, service: ModuleType, environment: Mapping[str, str]) -> Child:
        """Start a child and the copy of its output."""
        started = cls(service, environment)
        loop = asyncio.get_running_loop()
        loop.add_reader(started.output.descriptor, started._pass_on)
        background().at_close.add(started.end)
        return started

    def _pass_on(self) -> None:
        if not self.output.pass_on():
            asyncio.get_running_loop().remove_reader(self.output.descriptor)

    async def end(self) -> None:
        """End the supervisor, which first ends its descendants; if it was killed itself, find them by their mark."""
        supervisor = self.supervisor
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        background().at_close.discard(self.end)
        supervisor.stdin.close()
        supervisor.send_signal(signal.SIGCONT)  # the user's code may have stopped it
        finds_orphans = sys.platform.startswith("linux")  # else those that are still in its group are ended with it
        deadline = time.monotonic() + 2 * child.END_SECONDS * finds_orphans
        while supervisor.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if supervisor.returncode is None or not finds_orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS says the second
                os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.wait()
        if supervisor.returncode < 0:
            child.end_marked(self.mark)
        asyncio.get_running_loop().remove_reader(self.output.descriptor)
        while self.output.pass_on():
            pass
        supervisor.stdout.close()
        self.connection.close()

    def last_words(self) -> str:
        """How the worker ended, after `end`; the supervisor exits with its status."""
        if self.supervisor.returncode == child.BROKEN:
            return "its process cannot reply any more: a function must not close files that it did not open"
        return f"its process {child.ending(self.supervisor.returncode)}"


class Output:
    """Copies the output of a child to stderr, without control characters and at most `left` characters."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.left = descriptor, MOST_OUTPUT_CHARACTERS
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(descriptor, False)

    def pass_on(self) -> bool:
        """Print the available output; False at its end, or if there is none."""
        try:
            read = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not self.left:
            return bool(read)
        text = printable(self._decoder.decode(read).replace("\r\n", "\n"))
        rest = len(text) - self.left
        self.left = max(-rest, 0)
        text = text if rest < 0 else text[: len(text) - rest] + "\n(further output of the function is left out)\n"
        with contextlib.suppress(OSError, ValueError):  # the reader of stderr may be gone
            sys.stderr.write(text)
            sys.stderr.flush()
        return bool(read)
