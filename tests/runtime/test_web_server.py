"""The limits that `covey serve` and `covey watch` share, over real sockets: hostile connections, bodies and headers."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from covey.llm.remote.server import token_guard
from covey.runtime import web_server as module
from covey.runtime.web_server import WebServer, json_response, listen, web_server
from covey.watch.command import refuse as refuse_other_sites
from helpers.page_server import SECONDS, Client

HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
MOST_SENT = 64 << 20  # bytes, after which a connection counts as one that reads without end


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body, except at /unread; answers its size, at /large 32 MiB."""
    size, more = 0, scope["path"] != "/unread"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    if scope["path"] == "/fault":
        raise RuntimeError("a fault\nof the route")
    content = [" " * (32 << 20)] if scope["path"] == "/large" else {"bytes": size}
    await json_response(content)(scope, receive, send)


@contextmanager
def served(refuse: Any = lambda scope, headers: None, **options: Any) -> Iterator[tuple[Client, WebServer]]:
    """A server in a thread of this process."""
    with listen("127.0.0.1", 0) as listening:
        server = web_server(app, refuse, **options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Client(listening.getsockname()[1]), server
        finally:
            server.should_exit = True
            thread.join(SECONDS)
        assert not thread.is_alive()


def connected(client: Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", client.port), timeout=SECONDS)


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    content = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            content += part
    return content


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, b"GET / HTTP/1.1\r\nX: " + b"y" * 9000, b"\r\n"])
def test_connections_without_a_request_leave_room_for_others(sent: bytes) -> None:
    with served(most_waiting=16, most_connections=40) as (client, server), ExitStack() as opened:
        for _ in range(150):
            connection = opened.enter_context(connected(client))
            with suppress(ConnectionError):
                connection.sendall(sent)
        for _ in range(3):
            assert client.get("/").status == 200
        assert len(server.server_state.connections) <= 17


def test_requests_beyond_the_most_connections_are_told_so() -> None:
    with served(most_waiting=16, most_connections=4) as (client, server), ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(connected(client)).sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        wait_until(lambda: len(server.server_state.tasks) == 3)
        assert client.get("/").status == 503


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", HEAD, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123",
     b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n123", HEAD + b"\r\nGET / HT"],
)  # fmt: skip
def test_a_request_that_does_not_end_is_given_up(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECEPTION_SECONDS", 0.2)
    with served() as (client, _), connected(client) as slow:
        slow.sendall(sent)
        if sent.startswith(HEAD + b"\r\n"):
            assert b"200 OK" in slow.recv(1 << 16)
            slow.sendall(b"TP/1.1\r\n")
        received(slow)  # raises TimeoutError if the connection remains
        assert client.get("/").status == 200


def test_a_request_that_comes_byte_by_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes within any limit between two bytes."""
    monkeypatch.setattr(module, "RECEPTION_SECONDS", 0.3)
    with served() as (client, server), connected(client) as slow:
        wait_until(lambda: bool(server.server_state.connections))
        deadline = time.monotonic() + SECONDS
        with suppress(ConnectionError):
            while server.server_state.connections:
                slow.sendall(b"G" if time.monotonic() < deadline else pytest.fail("it is never given up"))
                time.sleep(0.02)


def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALLED_SECONDS", 0.2)
    with served() as (client, server), connected(client) as deaf:
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert deaf.recv(16)
        wait_until(lambda: not server.server_state.connections)
        assert len(client.get("/large").body) > 32 << 20  # a client that reads gets all


@pytest.mark.parametrize("path", ["/unread", "/refused"])
@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked", b"Content-Length: 999999999999"])
def test_a_body_that_nobody_reads_is_not_received(path: str, framing: bytes) -> None:
    def refuse(scope: Any, headers: Any) -> module.Refusal | None:
        return module.Refusal(401, "token", "no token") if scope["path"] == "/refused" else None

    with served(refuse) as (client, _), connected(client) as flood:
        flood.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % (path.encode(), framing))
        assert flood.recv(1 << 16).startswith(b"HTTP/1.1 401" if path == "/refused" else b"HTTP/1.1 200")
        sent, chunk = 0, b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        with suppress(ConnectionError):
            while sent < MOST_SENT:
                flood.sendall(chunk)
                sent += len(chunk)
        assert sent < MOST_SENT
        assert client.get("/").status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
        (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Content-Length: 3\r\nContent-Length: 4\r\n", 400),
        (b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (b"Content-Length: -1\r\n", 400),
        (b"Content-Length: +3\r\n", 400),
        (b"Host: y\r\n", 400),
        (b"X: " + b"y" * (17 << 10) + b"\r\n", 431),
        (b"".join(b"X-%d: y\r\n" % number for number in range(2500)), 431),
    ],
)
def test_requests_that_two_programs_may_read_differently_are_refused(headers: bytes, status: int) -> None:
    with served() as (client, _):
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        with connected(client) as connection:
            connection.sendall(head + headers + b"\r\n3\r\nabc\r\n0\r\n\r\n")
            assert int(received(connection).split()[1]) in (status, 400)
        assert client.get("/" + "x" * 5000).status == 414


@pytest.mark.sampled(10)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "TRACE"])
@pytest.mark.parametrize(
    "given",
    [[], ["wrong", "secret"], ["secret", "wrong"], ["secret", "secret"], ["secret, wrong"], ["wrong"], [""],
     ["secret x"], ["secre"]],
)  # fmt: skip
def test_one_authorization_header_opens_and_it_must_be_right(given: list[str], method: str) -> None:
    with served(token_guard("secret")) as (client, _):
        lines = "".join(f"Authorization: Bearer {token}\r\n" for token in given)
        request = f"{method} / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}\r\n"
        assert client.send(request.encode()).status == 401
        if method == "GET":
            assert client.get("/", authorization="Bearer secret").status == 200
            assert client.get("/health").status == 200


@pytest.mark.parametrize("name", ["Origin", "Host", "Sec-Fetch-Site"])
@pytest.mark.parametrize("foreign_first", [True, False])
def test_a_header_that_is_there_twice_is_not_that_of_the_page(name: str, foreign_first: bool) -> None:
    with served(refuse_other_sites) as (client, _):
        own = {"Origin": f"http://127.0.0.1:{client.port}", "Host": f"127.0.0.1:{client.port}",
               "Sec-Fetch-Site": "same-origin"}  # fmt: skip
        foreign = {"Origin": "http://evil.example", "Host": "evil.example", "Sec-Fetch-Site": "cross-site"}
        lines = [f"{key}: {value}" for key, value in own.items()]
        lines.insert(0 if foreign_first else len(lines), f"{name}: {foreign[name]}")
        request = "\r\n".join(["GET / HTTP/1.1", "Connection: close", *lines, "", ""])
        assert client.send(request.encode()).status in (400, 403)
        assert client.get("/", **{key.replace("-", "_").lower(): value for key, value in own.items()}).status == 200


def test_a_fault_of_a_route_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as (client, _):
        answer = client.get("/fault")
    assert (answer.status, answer.json["error"]["reason"]) == (500, "internal")
    assert b"fault" not in answer.body
    assert capsys.readouterr().err == "error: unexpected RuntimeError: a fault of the route\n"


def test_a_request_that_is_open_when_the_server_ends_is_told_so() -> None:
    with served() as (client, server), connected(client) as waiting:
        waiting.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        wait_until(lambda: bool(server.server_state.tasks))
        server.should_exit = True
        assert received(waiting).startswith(b"HTTP/1.1 503")
