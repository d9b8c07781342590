"""The server of `covey watch` in this process, behind a real socket, and requests to it byte by byte."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.runtime.web_server import listen
from covey.watch.answers import Answers
from covey.watch.command import page_server
from covey.watch.index import Indexer
from covey.watch.library import Library, run_id

SECONDS = 60.0  # of a request that hangs


@dataclass(frozen=True)
class Answer:
    """An answer of the server."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    """Sends requests to a port."""

    port: int

    def send(self, request: bytes) -> Answer:
        """The answer to these bytes, until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as connection:
            connection.sendall(request)
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return Answer(int(first.split()[1]), headers, unchunked(body) if "transfer-encoding" in headers else body)

    def get(self, target: str, method: str = "GET", **headers: str) -> Answer:
        """The answer to a request of the page itself; `headers` (with _ for -) replace the page's own."""
        given = {"host": f"127.0.0.1:{self.port}", "connection": "close"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        return self.send("\r\n".join([*lines, "", ""]).encode("utf-8"))

    def of_run(self, folder: Path, path: str = "") -> Answer:
        """The answer to a request below `/api/runs/{id}`."""
        return self.get(f"/api/runs/{run_id(folder.resolve())}{path}")


def unchunked(body: bytes) -> bytes:
    """The content of a body that was sent in chunks."""
    content = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        content += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return content


def children_of(pid: int | None) -> list[int]:
    """The processes that the threads of a process have started."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(word) for text in texts for word in text.split()]


@contextmanager
def serving_here(library: Library) -> Iterator[Client]:
    """The server of a library, in a thread of this process; it has ended with the block."""
    with listen("127.0.0.1", 0) as listening, Indexer() as indexer:
        server = page_server(Answers(library, indexer), indexer)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Client(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(SECONDS)
        assert not thread.is_alive()
