"""`covey serve`: what bodies may ask of it, and how it ends. `runtime/test_web_server.py` tests the connections."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.llm.remote import server as server_module
from covey.llm.remote import weights, wire
from covey.llm.remote.server import Server
from covey.runtime.foreign_json import BadJson, convert
from helpers.samplers import TOKEN, free_port, serving
from helpers.tiny_models import tiny_folder

GROUP = {"address": "127.0.0.1", "port": 1, "world_size": 2, "rank_offset": 1, "timeout_seconds": 60.0}


@pytest.mark.parametrize(
    "info",
    [
        None, {}, [], {"folder": 1}, {"folder": "a\0b"}, {"folder": "x" * 5000}, {"port": 1},
        *(GROUP | {name: wrong} for name, wrongs in {
            "address": ("localhost", "", "127.0.0.1:1", "1.2.3", 1, None, "::1%lo"),
            "port": (0, -1, 65536, 10**30, 1.0, "1", True, None),
            "world_size": (0, 1, 3, 10**9, 10**30, -2, 2.0, "2", None),
            "rank_offset": (0, 2, 10**9, -1, True, None),
            "timeout_seconds": (0, -1, 61, 10**400, 1e308, True, "1", None),
        }.items() for wrong in wrongs),
    ],
)  # fmt: skip
def test_a_group_that_no_run_makes_is_refused_at_once(info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(server_module, "connect_to_sender", asked.append)
    unused: Any = None
    app = Server(unused, unused, ()).app()
    assert answer_of(app, wire.INIT, {"init_info": info})[0] in (400, 409)
    assert not asked


def test_a_sender_whom_nobody_reaches_costs_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "TCPStore", lambda *_, **__: pytest.fail("it tries for as long as it may"))
    sender = convert(GROUP | {"port": free_port()}, weights.Sender)
    with pytest.raises(weights.BadWeights, match="could not be made"):
        weights.connect_to_sender(sender)


def test_a_shape_of_many_sizes_is_refused_before_they_are_multiplied() -> None:
    info = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2**39] * 100_000], "sha256": ""}
    with pytest.raises(BadJson, match=r"shapes\[0\] must be a list of length <= 8"):
        convert(info, weights.GroupUpdate)
    with pytest.raises(BadJson, match="that no weights have"):
        convert(info | {"shapes": [[2**39] * 8]}, weights.GroupUpdate).tensors()


@pytest.mark.parametrize(("route", "most"), [(wire.START, 64 << 10), (wire.PAUSE, None), (wire.UPDATE, 16 << 20)])
def test_a_body_is_read_up_to_what_its_route_needs(route: str, most: int | None) -> None:
    unused: Any = None
    status, read = answer_of(Server(unused, unused, ()).app(), route, itertools.repeat(b" " * 5000))
    assert status == (200 if most is None else 400)
    assert read <= (most or 0) + 5000


def answer_of(app: Any, route: str, body: Any) -> tuple[int, int]:
    """Status of a route in this process, and the bytes that it has read; the body is JSON, or chunks of it."""
    chunks = iter(body if isinstance(body, Iterator) else [json.dumps(body).encode()])
    read, statuses = [0], []

    async def receive() -> Any:
        chunk = next(chunks, b"")
        read[0] += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": isinstance(body, Iterator)}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": route, "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    return statuses[0], read[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_without_a_traceback_while_requests_are_open(tmp_path: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests were started so that they ignore this signal, as by nohup")
    with serving(tiny_folder(tmp_path / "model"), tmp_path, 1) as (one,):
        port = int(one.address.rpartition(":")[2])
        head = f"POST {wire.START} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nExpect: 100-continue\r\n"
        with socket.create_connection(("127.0.0.1", port)) as opened, socket.create_connection(("127.0.0.1", port)):
            opened.sendall(f"{head}Content-Length: 9\r\n\r\n".encode())
            assert b"100 Continue" in opened.recv(1 << 10)  # so the route has begun
            one.process.send_signal(number)
            code, said = one.process.ended()
    assert code == 130
    assert [line.partition(":")[0] for line in said.splitlines()][-3:] == [
        "Use it",
        "",
        "interrupted. Start again with",
    ]
    assert "Traceback" not in said
