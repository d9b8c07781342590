"""`covey serve` in processes, a client of its routes, and a proxy that delays, cuts and garbles answers."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.run_helpers import LIMIT_SECONDS, Running, start

TOKEN = "a-token-of-the-tests"


def token_file(folder: Path) -> Path:
    path = folder / "token"
    if not path.exists():
        path.touch(0o600)
        path.write_text(TOKEN)
    return path


@dataclass
class Serving:
    """A server in a process of its own."""

    process: Running
    address: str

    def kill(self) -> None:
        self.process.send_signal(9)
        self.process.wait()

    def ask(self, route: str, body: Any = None, token: str | None = TOKEN, method: str = "") -> tuple[int, Any]:
        return ask(self.address, route, body, token, method)


def ask(address: str, route: str, body: Any = None, token: str | None = TOKEN, method: str = "") -> tuple[int, Any]:
    """Status and JSON of an answer; a body that is bytes is sent as it is."""
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    kind = method or ("GET" if body is None else "POST")
    request = urllib.request.Request(address + route, content, headers, method=kind)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
            return answer.status, _parsed(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _parsed(error.read())


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        return content.decode(errors="replace")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def begin(model: Path, folder: Path, *words: str, port: int = 0) -> Serving:
    """Start a server; it may not answer yet."""
    port = port or free_port()
    said = ["serve", model, "--port", port, "--token-file", token_file(folder), "--precision", "fp32", "--threads", 1]
    return Serving(start(*said, *words, cwd=folder), f"http://127.0.0.1:{port}")


def wait_for(*servers: Serving) -> None:
    """Wait until the servers answer."""
    deadline = time.monotonic() + LIMIT_SECONDS
    for server in servers:
        while True:
            with contextlib.suppress(OSError):
                if server.ask("/health", token=None)[0] == 200:
                    break
            code = server.process.poll()
            assert code is None, f"the server has ended: {server.process.ended()}"
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextlib.contextmanager
def serving(model: Path, folder: Path, count: int = 2, words: Sequence[str] = ()) -> Iterator[list[Serving]]:
    """Context manager with servers of a model, which answer."""
    servers = [begin(model, folder, *words) for _ in range(count)]
    try:
        wait_for(*servers)
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.kill()


Bend = Callable[[bytes, bytes], bytes | None]  # from a request and its answer to what is sent; None: nothing, for ever


class Proxy:
    """A TCP proxy before a server, one request for each connection. `bend` changes the server's real answers."""

    def __init__(self, target: str, bend: Bend = lambda request, answer: answer) -> None:
        self.target, self.bend = int(target.rpartition(":")[2]), bend
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.asked: list[tuple[str, Any]] = []  # route and body of every request
        self.closed = threading.Event()

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self.listening.close()

    def groups(self) -> list[int]:
        """The groups whose completions were asked for here."""
        return [body["covey"]["group"] for route, body in self.asked if route == "/inference/v1/generate"]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self.closed.is_set():
                client, _ = self.listening.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.target)) as server:
            if not (request := _read_message(client)):
                return
            route = request.split(b" ", 2)[1].decode()
            body = request.partition(b"\r\n\r\n")[2]
            self.asked.append((route, json.loads(body) if body else None))
            server.sendall(request)
            sent = self.bend(request, _read_message(server))
            if sent is None:
                self.closed.wait(LIMIT_SECONDS)
            else:
                client.sendall(sent)


def _read_message(connection: socket.socket) -> bytes:
    """A request or an answer with its whole body."""
    content = b""
    while b"\r\n\r\n" not in content:
        if not (chunk := connection.recv(1 << 16)):
            return content
        content += chunk
    head, _, body = content.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: *(\d+)", head, re.I)
    length = int(found[1]) if found else 0
    while len(body) < length:
        if not (chunk := connection.recv(1 << 16)):
            break
        body += chunk
    return head + b"\r\n\r\n" + body


def is_generation(request: bytes) -> bool:
    return request.startswith(b"POST /inference/v1/generate")
