"""Many conversations with user code, each with a fork of one child, so that a fault ends its own conversation alone.

the run  <-- a socket for each session -->  a fork of the worker
   \\__ the connection: new sessions, ended ones __  the worker, which has loaded the user's code
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from covey.runtime.event_loop import background
from covey.runtime.worker.child import Message
from covey.runtime.worker.process import POLL_SECONDS, CallError, Child, Connection, Worker, as_line, result_of


class Sessions:
    """Forks of a child that has loaded a service, and that is started again if it has ended."""

    def __init__(
        self,
        service: ModuleType,
        setup: Callable[[], Message],
        seconds: float,
        load_seconds: float,
        **options: Any,
    ) -> None:
        """
        Args:
            service, setup, load_seconds, options: as of `Worker`.
            seconds: deadline of a request.
        """
        self._worker = Worker(service, lambda: {**setup(), "sessions": True}, load_seconds, **options)
        self.seconds = seconds
        self._numbers = itertools.count()
        self._starting, self._sending = asyncio.Lock(), asyncio.Lock()
        self._open: set[Session] = set()

    def start(self) -> Message:
        """Start the child; returns the reply to the first request. Errors as of `Worker.ask`."""
        return background().run(self._worker.start())

    def open(self, seed: Any) -> Session:
        """A new session, which the service makes from a seed or settings. The child is started if there is none.

        Raises:
            CallError: if it cannot be started.
        """
        return background().run(self._begin(seed))

    def close(self) -> None:
        """End all sessions."""
        background().run(self._end())

    async def _begin(self, seed: Any) -> Session:
        for _attempt in range(2):
            async with self._starting:
                if self._worker.child is None:
                    await self._worker.start()
            child, number = self._worker.child, next(self._numbers)
            assert child is not None
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    await self._send(child, {"new": number, "seed": seed}, [theirs.fileno()])
                except OSError:  # the worker was killed
                    ours.close()
                    await self._end()
                    continue
            ours.setblocking(False)
            session = Session(self, child, Connection(ours, child.output), number)
            self._open.add(session)
            return session
        raise CallError("its process ends again and again")

    async def _end(self) -> None:
        for session in list(self._open):
            session.failed = session.failed or "the run ended"
            session.connection.close()
        await self._worker.end()
        self._open.clear()

    async def end_session(self, session: Session) -> None:
        """End the fork of a session, and close its socket."""
        if session in self._open:
            self._open.discard(session)
            with contextlib.suppress(OSError):  # the worker was killed
                await self._send(session.child, {"end": session.number})
        session.connection.close()

    async def _send(self, child: Child, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a line to the worker, which is not between a request and its reply; a socket may take it in parts."""
        line = as_line(message)
        async with self._sending:
            while line:
                try:
                    line = line[socket.send_fds(child.connection.socket, [line], descriptors) :]
                    descriptors = ()
                except BlockingIOError:
                    await asyncio.sleep(POLL_SECONDS)


class Session:
    """A conversation with a fork of the child. After a fault of the process every request fails."""

    def __init__(self, sessions: Sessions, child: Child, connection: Connection, number: int) -> None:
        self._sessions, self.child, self.connection, self.number = sessions, child, connection, number
        self.failed = ""

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> Future[Message]:
        """The reply to a request; the future raises CallError. One at a time.

        `seconds` overrides the default deadline.
        """
        return background().submit(self._ask(request, self._sessions.seconds if seconds is None else seconds))

    def close(self) -> None:
        """End the fork."""
        background().submit(self._end("the conversation is over"))

    async def _ask(self, request: Mapping[str, Any], seconds: float) -> Message:
        if self.failed:
            raise CallError(self.failed)
        try:
            async with asyncio.timeout(seconds):
                reply = await self.connection.exchange(request)
        except TimeoutError:
            await self._end(f"took longer than {seconds:g} s for one call")
        except EOFError:
            await self._end("its process ended before it answered")
        except CallError as error:
            await self._end(str(error))
        else:
            return result_of(reply)
        raise CallError(self.failed)

    async def _end(self, reason: str) -> None:
        self.failed = self.failed or reason
        await self._sessions.end_session(self)
