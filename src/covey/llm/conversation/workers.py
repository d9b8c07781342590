"""Environments under a deadline, each in a process of its own.

A request to an environment is answered by a future, so that sampling goes on while environments think.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Protocol

from covey.config import ConfigError
from covey.config.named_modules import search_path
from covey.llm.conversation import environment_worker
from covey.llm.rewards.supervised_process import MOST_OUTPUT_CHARACTERS, SupervisedProcess
from covey.llm.rewards.worker import MOST_REPLY_BYTES

LOAD_LEAST_SECONDS = 60.0  # to import a file of environments, or to prepare an adapter
Reply = dict[str, Any]


class EnvironmentFailed(Exception):
    """An environment raised, hung, died or answered something unusable; one line with the reason."""


class Session(Protocol):
    """The environment of one conversation."""

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> Future[Reply]:
        """The reply to a request of `HostedEnvironment`; the future raises EnvironmentFailed. One at a time.

        `seconds` is a deadline in place of that of all requests.
        """

    def close(self) -> None:
        """End the environment."""


class Environments(Protocol):
    """Source of environments."""

    def open(self, seed: int) -> Session:
        """A new environment. Global random generators of its process are seeded."""

    def close(self) -> None:
        """End all environments."""


class EnvironmentProcesses:
    """Environments of one class, each in a process; implements `Environments`.

    The worker is started by `start`, or with the first environment, and again if it has ended.
    """

    def __init__(
        self,
        name: str,
        timeout_seconds: float,
        reply_characters: int,
        options: Mapping[str, Any] | None = None,
        copied: bytes | None = None,
        path: Sequence[str] = (),
    ) -> None:
        """
        Args:
            name: of the class, file.py:Class or module:Class.
            timeout_seconds: deadline of a call.
            reply_characters: longest reply.
            options: keyword arguments of the class.
            copied: the class of a Python program, from `copied_environment`; then `name` is only for messages.
            path: `sys.path` of the process; empty: that of `search_path`.
        """
        self.name, self.timeout_seconds, self._reply_characters = name, timeout_seconds, reply_characters
        self._options, self._copied, self._path = dict(options or {}), copied, path
        self._worker: _Worker | None = None
        self._numbers = itertools.count()

    def start(self) -> None:
        """Start the worker, which imports the class.

        Raises:
            ConfigError: if it cannot be imported or is no environment.
        """
        request = {
            "load": self.name,
            "path": self._path or search_path(self.name),
            "reply_characters": self._reply_characters,
            "options": self._options,
        }
        worker = self._worker = _Worker()
        seconds = max(self.timeout_seconds, LOAD_LEAST_SECONDS)
        try:
            loaded = worker.load(request, seconds, self._copied)
        except TimeoutError:
            loaded = {
                "failed": f"importing its file took longer than {seconds:g} s; raise conversation.timeout_seconds"
            }
        except (OSError, ValueError):
            loaded = {"failed": "its process ended while it was imported"}
        if "failed" in loaded:
            self.close()
            name = self.name.removeprefix("covey.llm.conversation.environments.")
            raise ConfigError(f"environment {name} cannot be loaded: {loaded['failed']}")

    def open(self, seed: int) -> Session:
        number = next(self._numbers)
        for _attempt in range(2):
            if self._worker is None:
                self.start()
            assert self._worker is not None
            with contextlib.suppress(OSError):  # the worker was killed
                return self._worker.open(number, seed, self.timeout_seconds)
            self.close()
        raise ConfigError(f"environment {self.name}: its process ends again and again")

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


class _Worker(SupervisedProcess):
    """The process of the environments, and the thread that exchanges requests and replies with all of them."""

    def __init__(self) -> None:
        # Messages with bounds, which carry file descriptors.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        super().__init__(str(Path(environment_worker.__file__)), (theirs.detach(),))
        self.exchanges: _Exchanges | None = None

    def load(self, request: dict[str, Any], seconds: float, copied: bytes | None = None) -> Reply:
        """Load the class. Raises TimeoutError at the deadline."""
        with tempfile.TemporaryFile() as file:  # `copied` may be too large for a message
            file.write(copied or b"")
            file.seek(0)
            message = json.dumps(request | {"copied": copied is not None}, default=str).encode()
            socket.send_fds(self.control, [message], [file.fileno()])
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            deadline = time.monotonic() + seconds
            while not selector.select(0.05):
                self.output.pass_on()
                if time.monotonic() > deadline:
                    raise TimeoutError
                if self.supervisor.poll() is not None:
                    raise OSError
        reply: Reply = json.loads(self.control.recv(environment_worker.MOST_CONTROL_BYTES))
        self.exchanges = _Exchanges(self)
        self.exchanges.start()
        return reply

    def open(self, number: int, seed: int, seconds: float) -> Session:
        assert self.exchanges is not None
        self.output.left = MOST_OUTPUT_CHARACTERS
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                socket.send_fds(self.control, [json.dumps({"new": number, "seed": seed}).encode()], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        session = _ProcessSession(self.exchanges, ours, number, seconds)
        self.exchanges.put(lambda: session.exchanges.watch(session))
        return session

    def kill(self, number: int) -> None:
        """End the process of one environment."""
        with contextlib.suppress(OSError):
            self.control.send(json.dumps({"end": number}).encode())

    def end(self) -> None:
        if self.exchanges is not None:
            self.exchanges.stop()
        super().end()

    def close_pipes(self) -> None:
        self.control.close()


class _ProcessSession:
    """The socket to one environment. Except for `ask` and `close`, only the thread of `_Exchanges` uses it."""

    def __init__(self, exchanges: _Exchanges, connection: socket.socket, number: int, seconds: float) -> None:
        connection.setblocking(False)
        self.connection, self.number, self.seconds = connection, number, seconds
        self.exchanges, self.requests = exchanges, itertools.count()
        self.to_write, self.reply = memoryview(b""), bytearray()
        self.future: Future[Reply] | None = None
        self.expected = ""
        self.allowed = self.deadline = 0.0
        self.failed = ""

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> Future[Reply]:
        future: Future[Reply] = Future()
        id = f"{self.number}.{next(self.requests)}"
        try:
            line = json.dumps({**request, "id": id}, default=_in_json).encode() + b"\n"
        except (TypeError, ValueError, RecursionError):
            _fail(future, "a column of the data cannot be sent to its process as JSON")
            return future
        limit = self.seconds if seconds is None else seconds
        self.exchanges.put(lambda: self._begin(line, id, future, limit))
        return future

    def close(self) -> None:
        if self.exchanges.is_alive():
            self.exchanges.put(self._close)

    def fail(self, reason: str) -> None:
        """Fail the open request, and end the process."""
        self.failed = self.failed or reason
        self.exchanges.worker.kill(self.number)
        future = self.future
        self._close()
        if future is not None:
            _fail(future, self.failed)

    def events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.to_write else 0)

    def advance(self, events: int) -> None:
        """Write and read what is possible."""
        try:
            if events & selectors.EVENT_WRITE and self.to_write:
                self.to_write = self.to_write[self.connection.send(self.to_write) :]
                if not self.to_write:
                    self.exchanges.watch(self)
            if events & selectors.EVENT_READ:
                read = self.connection.recv(1 << 16)
                self.reply += read
                if not read:
                    self.fail("its process ended before it answered")
                elif b"\n" in read:
                    self._take()
                elif len(self.reply) > MOST_REPLY_BYTES:
                    self.fail("its process answered more than fits into a reply")
        except BlockingIOError:
            pass
        except OSError:
            self.fail("its process ended before it answered")

    def _begin(self, line: bytes, id: str, future: Future[Reply], seconds: float) -> None:
        if self.failed:
            _fail(future, self.failed)
            return
        self.to_write, self.future, self.expected = memoryview(line), future, id
        self.allowed, self.deadline = seconds, time.monotonic() + seconds
        self.exchanges.watch(self)

    def _take(self) -> None:
        line, _, rest = bytes(self.reply).partition(b"\n")
        self.reply.clear()
        reply = None
        with contextlib.suppress(ValueError, RecursionError):
            reply = json.loads(line)
        if rest or not isinstance(reply, dict) or reply.get("id") != self.expected or self.future is None:
            self.fail("something other than a reply came from its process")
            return
        future, self.future = self.future, None
        _answer(future, reply)

    def _close(self) -> None:
        self.failed = self.failed or "the conversation is over"
        self.future = None
        self.exchanges.forget(self)
        self.connection.close()


class _Exchanges(threading.Thread):
    """The thread that exchanges requests and replies with all environments of a worker, and watches the deadlines."""

    def __init__(self, worker: _Worker) -> None:
        super().__init__(daemon=True, name="covey-environments")
        self.worker = worker
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(worker.output.descriptor, selectors.EVENT_READ)
        self._sessions: set[_ProcessSession] = set()

    def put(self, action: Callable[[], None] | None) -> None:
        """Call an action in this thread."""
        self._actions.put(action)
        with contextlib.suppress(OSError):  # it has ended
            self._wake.send(b"1")

    def stop(self) -> None:
        """Fail the open requests, and end the thread."""
        self.put(None)
        self.join()

    def watch(self, session: _ProcessSession) -> None:
        known = session in self._sessions
        self._sessions.add(session)
        change = self._selector.modify if known else self._selector.register
        change(session.connection, session.events(), session)

    def forget(self, session: _ProcessSession) -> None:
        if session in self._sessions:
            self._sessions.discard(session)
            self._selector.unregister(session.connection)

    def run(self) -> None:
        going = True
        while going:
            for key, events in self._selector.select(self._seconds_left()):
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(1 << 16)
                elif key.data is None:
                    if not self.worker.output.pass_on():
                        self._selector.unregister(key.fileobj)
                elif key.data in self._sessions:
                    key.data.advance(events)
            going = self._act()
            self._expire()
        for session in list(self._sessions):
            session.fail("the run ended")
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _act(self) -> bool:
        """Call the actions that have come; False if the thread must end."""
        with contextlib.suppress(queue.Empty):
            while (action := self._actions.get_nowait()) is not None:
                action()
            return False
        return True

    def _seconds_left(self) -> float | None:
        deadlines = [session.deadline for session in self._sessions if session.future is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        for session in list(self._sessions):
            if session.future is not None and session.deadline <= now:
                session.fail(_too_slow(session.allowed))


def _too_slow(seconds: float) -> str:
    return f"took longer than {seconds:g} s for one call"


def _fail(future: Future[Reply], reason: str) -> None:
    with contextlib.suppress(InvalidStateError):  # the deadline was first, or the answer
        future.set_exception(EnvironmentFailed(reason))


def _answer(future: Future[Reply], reply: Reply) -> None:
    if "failed" in reply:
        _fail(future, reply["failed"])
        return
    with contextlib.suppress(InvalidStateError):
        future.set_result(reply)


def _in_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
