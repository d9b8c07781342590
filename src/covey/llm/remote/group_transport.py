"""Weights over a process group of torch.distributed: a TCP store and a broadcast by gloo, one pair for each server.

The connections are neither encrypted nor authenticated, so they belong on a private network. To a server on this
machine they are made over the loopback interface.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

from covey.llm.remote import wire
from covey.llm.remote.client import Client, LostServer
from covey.llm.remote.staging import BadWeights, dtype_name

SENDER, RECEIVER, PAIR = 0, 1, 2  # ranks and size of a group
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MOST_DIMENSIONS = 8  # of a tensor
Gloo = Any  # a ProcessGroupGloo; torch declares few of its methods
STORE_SECONDS = 60.0  # in which both ends must have connected
REACH_SECONDS = 5.0  # in which the sender, who listens before it asks, must accept a connection


@dataclass(frozen=True)
class GroupTransport:
    """Sends the tensors to each server by itself; implements `Transport`."""

    timeout_seconds: float  # of one tensor

    @contextmanager
    def offered(self, tensors: Mapping[str, Tensor], name: str) -> Iterator[GroupOffer]:
        yield GroupOffer(tensors, checksum(tensors.values()), self.timeout_seconds)


@dataclass(frozen=True)
class GroupOffer:
    """Tensors that are sent to any number of servers; implements `Offer`."""

    tensors: Mapping[str, Tensor]
    sha256: str
    timeout_seconds: float
    _groups: dict[str, Gloo] = field(default_factory=dict)  # by the server's address

    async def connect(self, client: Client) -> None:
        """Make a group with the server."""
        address, listening = _listen(client.address)
        with listening:
            port = listening.getsockname()[1]
            info = {
                "address": address, "port": port, "world_size": PAIR, "rank_offset": RECEIVER,
                "timeout_seconds": STORE_SECONDS,
            }  # fmt: skip
            await _both(
                asyncio.to_thread(self._make_group, client.address, address, listening),
                client.post(wire.INIT, {"init_info": info}),
            )

    async def send(self, client: Client, label: Mapping[str, str]) -> None:
        """Send all tensors, one after the other."""
        info: dict[str, Any] = {
            "names": list(self.tensors),
            "dtypes": [dtype_name(tensor.dtype) for tensor in self.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
            "sha256": self.sha256,
        }
        group = self._groups.pop(client.address)
        await _both(
            asyncio.to_thread(_send, group, list(self.tensors.values()), self.timeout_seconds),
            client.post(wire.UPDATE, {"update_info": info | dict(label)}),
        )

    def _make_group(self, key: str, address: str, listening: socket.socket) -> None:
        wait = timedelta(seconds=STORE_SECONDS)
        port = listening.getsockname()[1]
        store = TCPStore(
            address, port, PAIR, True, timeout=wait, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._groups[key] = make_group(store, SENDER, address, self.timeout_seconds)


def read_sender(info: Mapping[str, Any]) -> dict[str, Any]:
    """The address of a sender's store, from outside.

    Raises:
        BadBody: if it is none.
    """
    address, port = info.get("address"), info.get("port")
    try:
        ipaddress.IPv4Address(address if isinstance(address, str) else "")
    except ValueError:
        raise wire.BadBody("init_info.address must be an address such as 127.0.0.1") from None
    if type(port) is not int or not 0 < port < 65536:
        raise wire.BadBody("init_info.port must be a port")
    for name, only in (("world_size", PAIR), ("rank_offset", RECEIVER)):
        if type(info.get(name)) is not int or info[name] != only:
            raise wire.BadBody(f"init_info.{name} must be {only}: a group has the run and one server")
    seconds: Any = info.get("timeout_seconds")
    if type(seconds) not in (int, float) or not 0 < seconds <= STORE_SECONDS:
        raise wire.BadBody(f"init_info.timeout_seconds must be a number up to {STORE_SECONDS:g}")
    return {"address": address, "port": port, "seconds": float(seconds)}


def read_announced(info: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors without memory of the names, shapes and dtypes in an `update_info` from outside.

    Raises:
        BadBody: if it has none.
    """
    names, dtypes, shapes = (info.get(name) for name in ("names", "dtypes", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        raise wire.BadBody("update_info must have path, or names, dtypes and shapes")
    if not len(names) == len(dtypes) == len(shapes) == len({name for name in names if isinstance(name, str)}):
        raise wire.BadBody("update_info must have one dtype and one shape for each name")
    found: dict[str, Tensor] = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = next((one for one in DTYPES if dtype_name(one) == dtype), None)
        whole = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS
        whole = whole and all(type(size) is int and 0 <= size < 2**40 for size in shape)
        if kind is None or not whole or math.prod(shape) >= 2**60:
            raise wire.BadBody("update_info has a dtype or a shape that no weights have")
        found[name] = torch.empty(shape, dtype=kind, device="meta")
    return found


def connect_to_sender(info: Mapping[str, Any]) -> Gloo:
    """The server's end of a group, from the `init_info` of a sender.

    Raises:
        BadWeights: if the sender cannot be reached.
    """
    sender = info["address"], info["port"]
    try:
        socket.create_connection(sender, REACH_SECONDS).close()  # the store would try again for all its time
        store = TCPStore(*sender, PAIR, False, timeout=timedelta(seconds=info["seconds"]))
        return make_group(store, RECEIVER, _own_address(info["address"]), info["seconds"])
    except (OSError, RuntimeError) as error:
        raise BadWeights("the process group of the weights could not be made") from error


def make_group(store: TCPStore, rank: int, address: str, seconds: float) -> Gloo:
    """One end of a group of two, at this address of this machine."""
    gloo: Gloo = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, PAIR, options)


def receive(group: Gloo, names: Sequence[str], own: Mapping[str, Tensor], sha256: str) -> dict[str, Tensor]:
    """Tensors of the shapes and dtypes of a model's own.

    Raises:
        BadWeights: if the sender ends, or the tensors do not have the announced checksum.
    """
    received: dict[str, Tensor] = {}
    try:
        for name in names:
            received[name] = torch.empty_like(own[name], device="cpu")
            group.broadcast(received[name], SENDER).wait()
    except RuntimeError as error:
        raise BadWeights("the weights were cut off") from error
    if checksum(received.values()) != sha256:
        raise BadWeights("the weights do not have the checksum that was announced")
    return received


def checksum(tensors: Any) -> str:
    """SHA-256 of the bytes of tensors, one after the other, in hexadecimal digits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _send(group: Gloo, tensors: Sequence[Tensor], seconds: float) -> None:
    try:
        for tensor in tensors:
            group.broadcast(tensor, SENDER).wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise LostServer("a server has ended while it received weights") from error


async def _both(ours: Any, theirs: Any) -> None:
    """Wait for this process and for the server, whose error is the cause if both fail."""
    our_end, their_end = asyncio.ensure_future(ours), asyncio.ensure_future(theirs)
    results = await asyncio.gather(our_end, their_end, return_exceptions=True)
    for result in reversed(results):
        if isinstance(result, RuntimeError):
            raise LostServer(f"no process group could be made ({' '.join(str(result).split())[:100]})")
        if isinstance(result, BaseException):
            raise result


def _listen(server: str) -> tuple[str, socket.socket]:
    """A socket for the store, at the address of this machine from which the server is reached."""
    parts = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing
        address = probe.getsockname()[0]
    return address, socket.create_server((address, 0))


def _own_address(sender: str) -> str:
    """The address of this machine from which the sender is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((sender, 9))
        return str(probe.getsockname()[0])
