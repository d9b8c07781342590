"""The common parts of covey's two servers, `covey serve` and `covey watch`: socket, limits, gate, end, and responses.

The only file that imports uvicorn. The routes are in `llm/remote/server.py` and `watch/server.py`.

A client may be hostile: it connects and sends nothing, sends a head or a body without end, does not read an answer, or
repeats a header in the hope that another program reads the other one. `_Connection` bounds the number of connections
without a request and the time of each part; `Gate` refuses requests before a route reads them.
"""

import asyncio
import json
import math
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from covey.config.terminal import say
from covey.runtime.interrupts import SIGNALS

GRACE_SECONDS = 0.5  # that open requests have when the server ends
RECEPTION_SECONDS = 60.0  # from the first byte of a request to its last
STALLED_SECONDS = 60.0  # in which a client must read a part of an answer
BACKLOG = 512  # connections that are accepted at once
LONGEST_TARGET = 4096  # bytes of a path with its query
LARGEST_HEADERS = 16 << 10  # bytes of all headers
LARGEST_HEAD = 32 << 10  # bytes of a request's head, or of a chunk's, at which the connection is closed


class Refusal(NamedTuple):
    """The answer to a request that is refused."""

    status: int
    reason: str  # for programs
    message: str  # for people, one line
    headers: Mapping[str, str] | None = None


Refuse = Callable[[Scope, Mapping[str, str]], Refusal | None]


def json_response(content: Any, status: int = 200) -> Response:
    """The value as JSON."""
    return Response(json.dumps(content), status, media_type="application/json")


def failure(status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as JSON, with a reason for programs and a message for people."""
    content = json.dumps({"error": {"reason": reason, "message": message}})
    return Response(content, status, headers, media_type="application/json")


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks, truncated."""
    return " ".join(str(error).split())[:500]


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at this address; port 0 is a free one.

    Raises:
        OSError: if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


class WebServer(uvicorn.Server):
    """A server that ends at the first of `SIGNALS`, and then raises KeyboardInterrupt, outside of its event loop."""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until a signal, or until `should_exit` is True.

        Raises:
            KeyboardInterrupt: after a signal.
        """
        super().run(sockets)
        if self._captured_signals:
            raise KeyboardInterrupt

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context manager in which signals end the server. An ignored one, as SIGHUP by nohup, remains ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in caught:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in caught:
                signal.signal(number, before[number])


def web_server(
    app: ASGIApp,
    refuse: Refuse,
    *,
    most_waiting: int | None = None,
    most_connections: int | None = None,
    headers: Iterable[tuple[str, str]] = (),
) -> WebServer:
    """A server that answers requests by `app`; `run(sockets=[...])` ends at SIGINT, SIGTERM or SIGHUP.

    Args:
        refuse: see `Gate`.
        most_waiting: connections without a request, beyond which the oldest is closed; None: half of the open files
            that the process may have.
        most_connections: connections beyond which requests are answered with 503; None: any number.
        headers: further ones of every answer.
    """
    if most_waiting is None:
        most_waiting = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1)
    config = uvicorn.Config(
        Gate(app, refuse),
        http=partial(_Connection, most_waiting=most_waiting),  # type: ignore[arg-type]
        ws="none", lifespan="off", proxy_headers=False, server_header=False, date_header=False, headers=list(headers),
        log_config=None, log_level="critical", access_log=False,  # a client could fill the log
        h11_max_incomplete_event_size=LARGEST_HEAD, limit_concurrency=most_connections, backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE_SECONDS,  # type: ignore[arg-type]
    )  # fmt: skip
    return WebServer(config)


class Gate:
    """ASGI middleware in front of the routes: refuses malformed requests, and ends every one with an answer.

    `refuse` gets the scope and the headers by their names in lower case. A header that is there several times has its
    values joined by commas (RFC 9110, section 5.3), so it equals none of them.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self.app, self.refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = False

        async def noted(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        headers = joined(scope["headers"])
        try:
            refusal = malformed(scope, headers) or self.refuse(scope, headers)
            await (failure(*refusal) if refusal else self.app)(scope, receive, noted)
        except asyncio.CancelledError:  # the server ends
            if not began:
                await failure(503, "ending", "the server ends")(scope, receive, send)
        except Exception as error:
            say(f"error: unexpected {type(error).__name__}: {one_line(error)}", sys.stderr)
            if not began:
                await failure(500, "internal", "an error within the server")(scope, receive, send)


def joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by their names in lower case; the values of one that is repeated are joined by commas."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
        found[name] = f"{found[name]}, {text}" if name in found else text
    return found


def malformed(scope: Scope, headers: Mapping[str, str]) -> Refusal | None:
    """The refusal of a request that no route may read; None for others."""
    if len(scope["raw_path"]) + len(scope["query_string"]) > LONGEST_TARGET:
        return Refusal(414, "too_long", f"the address has more than {LONGEST_TARGET} bytes")
    if sum(len(name) + len(value) for name, value in headers.items()) > LARGEST_HEADERS:
        return Refusal(431, "too_large", f"the headers have more than {LARGEST_HEADERS} bytes")
    if "transfer-encoding" in headers and "content-length" in headers:
        return Refusal(400, "length", "the request has both Transfer-Encoding and Content-Length")
    return None


class _Connection(H11Protocol):
    """A connection of uvicorn with limits of time, and of the number that wait for a request."""

    def __init__(self, *arguments: Any, most_waiting: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.most_waiting = most_waiting
        self._reception: asyncio.TimerHandle | None = None  # runs while a request is received
        self._sending: asyncio.TimerHandle | None = None  # runs while the client must read

    @property
    def is_waiting(self) -> bool:
        """True if it is open, and no whole head of a request has come."""
        return self.conn.their_state is h11.IDLE and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._began = self.loop.time()
        self._time_reception()
        waiting = [one for one in self.connections if isinstance(one, _Connection) and one.is_waiting]
        if len(waiting) > self.most_waiting:
            min(waiting, key=lambda one: one._began).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_reception()

    def on_response_complete(self) -> None:
        """See uvicorn. A body that the route has not read would be received for as long as the client sends it."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_sending(math.inf)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._sending)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._reception)
        _cancel(self._sending)
        super().connection_lost(exc)

    def _time_reception(self) -> None:
        """Start the deadline of a request when its first byte comes, and stop it when it is whole."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            _cancel(self._reception)
            self._reception = None
        elif self._reception is None:
            self._reception = self.loop.call_later(RECEPTION_SECONDS, self.transport.abort)

    def _check_sending(self, before: float) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        else:
            self._sending = self.loop.call_later(STALLED_SECONDS, self._check_sending, left)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
