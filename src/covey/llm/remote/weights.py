"""The way of a policy's weights to servers, through a file or over a process group, and into a server.

`FileTransport` writes a file that the servers read. `GroupTransport` has a TCP store and a broadcast by gloo of
torch.distributed, one pair for each server. Its connections are neither encrypted nor authenticated, so they belong on
a private network; to a server on this machine they are made over the loopback interface.

A server receives and verifies new weights whole before a weight of its model is touched.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo, TCPStore
from torch.distributed.tensor import DTensor

from covey.config import MachineError
from covey.llm.model.lora import merged_tensors
from covey.llm.remote import wire
from covey.llm.remote.client import Client, LostServer, OtherWeights
from covey.runtime.foreign_json import BadJson, read_json

SHARED_MEMORY = Path("/dev/shm")
LARGEST_HEADER = 64 << 20  # bytes of a safetensors file beside its weights
SENDER, RECEIVER, PAIR = 0, 1, 2  # ranks and size of a process group
DTYPES = {str(one).removeprefix("torch."): one for one in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
Gloo = Any  # a ProcessGroupGloo; torch declares few of its methods
STORE_SECONDS = 60.0  # in which both ends must have connected
REACH_SECONDS = 5.0  # in which the sender, who listens before it asks, must accept a connection


class BadWeights(Exception):
    """Weights that a server refuses; the message is one line."""


def gathered(module: nn.Module, dtype: torch.dtype, keep: bool = True) -> dict[str, Tensor]:
    """The parameters of a module by name, whole, merged with its adapter, and on the CPU; a tied one is there once.

    If they are sharded, every rank must call it.

    Args:
        dtype: the dtype in which they are sent.
        keep: False on ranks that only take part.
    """
    tensors = ((name, _whole(parameter.detach())) for name, parameter in module.named_parameters())
    if not keep:
        for _ in tensors:
            """Take part."""
        return {}
    merged = merged_tensors(module, tensors)
    return {name: tensor.to(dtype=dtype, device="cpu").contiguous() for name, tensor in merged}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(module: nn.Module) -> bool:
    """True if a rank has only a part of the weights."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


@dataclass(frozen=True)
class FileOffer:
    """A file of safetensors, ready to be taken by any number of servers."""

    path: Path
    sha256: str

    async def connect(self, client: Client) -> None:
        """Prepare the server to receive."""
        await client.post(wire.INIT, {"init_info": {"folder": str(self.path.parent)}})

    async def send(self, client: Client, label: Mapping[str, str]) -> None:
        """Let the server read the file; `label` are further fields of the body."""
        await client.post(wire.UPDATE, {"update_info": {"path": str(self.path), "sha256": self.sha256, **label}})


@dataclass(frozen=True)
class FileTransport:
    """Through a file that is removed when all servers have read it."""

    folder: str = ""  # empty: a private one

    @contextmanager
    def offered(self, tensors: Mapping[str, Tensor], name: str) -> Iterator[FileOffer]:
        """The offer of these tensors; `name` is their version."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        folder = Path(self.folder) if self.folder else private_folder(size)
        path = folder / f"{os.getpid()}-{name}.safetensors"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            save_file(dict(tensors), path)
            os.chmod(path, 0o600)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield FileOffer(path, digest)
        finally:
            with suppress(OSError):
                path.unlink()


def private_folders() -> tuple[Path, ...]:
    """The folders in which files with weights may be if none is named: in memory, and that of temporary files."""
    name = f"covey-weights-{os.getuid()}"
    bases = [SHARED_MEMORY, Path(tempfile.gettempdir())]
    return tuple(base / name for base in bases if base.is_dir())


def private_folder(size: int) -> Path:
    """The first of these folders with room for `size` bytes, created if it does not exist.

    Raises:
        MachineError: if none has room, or one belongs to another user.
    """
    for folder in private_folders():
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if found.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink() or found.st_mode & 0o077:
            raise MachineError(f"{folder} is not a private folder of this user: remove it, or set sampler.folder")
        _remove_files_of_killed_runs(folder)
        if shutil.disk_usage(folder).free > size + size // 16:
            return folder
    raise MachineError(f"no folder has room for {size:,} bytes of weights: set sampler.folder to one that has")


def _remove_files_of_killed_runs(folder: Path) -> None:
    """Remove the files of processes that have ended, from a private folder; a file's name begins with its process."""
    for path in folder.glob("*.safetensors"):
        try:
            os.kill(int(path.name.partition("-")[0]), 0)
        except ValueError:
            continue
        except ProcessLookupError:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class GroupTransport:
    """Sends the tensors to each server by itself."""

    timeout_seconds: float  # of one tensor

    @contextmanager
    def offered(self, tensors: Mapping[str, Tensor], name: str) -> Iterator[GroupOffer]:
        yield GroupOffer(tensors, checksum(tensors.values()), self.timeout_seconds)


@dataclass(frozen=True)
class GroupOffer:
    """Tensors that are sent to any number of servers."""

    tensors: Mapping[str, Tensor]
    sha256: str
    timeout_seconds: float
    _groups: dict[str, Gloo] = field(default_factory=dict)  # by the server's address

    async def connect(self, client: Client) -> None:
        """Make a group with the server."""
        server = urlsplit(client.address)
        address = _own_address(server.hostname, server.port or 80)
        with socket.create_server((address, 0)) as listening:
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


Transport = FileTransport | GroupTransport


def checksum(tensors: Iterable[Any]) -> str:
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


def _own_address(host: str | None, port: int) -> str:
    """The address of this machine from which another is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


async def give(client: Client, offer: FileOffer | GroupOffer, version: str, *, covey: bool) -> None:
    """Let one server take weights, and check that it reports their version.

    Raises:
        LostServer: if it does not.
    """
    label = {"weight_version": version} if covey else {}
    await client.get(wire.HEALTH)
    await offer.connect(client)
    await client.post(f"{wire.PAUSE}?mode=keep", {})
    try:
        try:
            await client.post(wire.START, label)
        except LostServer as error:  # an update of a run that has ended was open
            if not isinstance(error, OtherWeights):  # covey's own server has closed it; vLLM does after a failed one
                with suppress(LostServer):
                    await client.post(wire.UPDATE, {"update_info": {}})
            await client.post(wire.START, label)
        await offer.send(client, label)
        await client.post(wire.FINISH, {"weight_version": version})
        await client.post(wire.RESET_CACHE, {})
    finally:
        await client.post(wire.RESUME, {})
    reported = ""
    with suppress(BadJson):
        reported = read_json(await client.get(wire.WEIGHT_INFO), wire.VERSIONED).weight_version
    if reported != version:
        raise OtherWeights(f"{client.address} reports other weights than those that it was given")


class Sender(Struct):
    """The store of a sender, in a server's `init_info`: a group has the run and one server."""

    address: str
    port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    world_size: Annotated[int, Meta(ge=PAIR, le=PAIR)]
    rank_offset: Annotated[int, Meta(ge=RECEIVER, le=RECEIVER)]
    timeout_seconds: Annotated[float, Meta(gt=0, le=STORE_SECONDS)]

    def __post_init__(self) -> None:
        try:
            ipaddress.IPv4Address(self.address)
        except ValueError:
            raise ValueError("address must be an address such as 127.0.0.1") from None


class FileUpdate(Struct):
    """The `update_info` of weights in a file."""

    path: str
    sha256: str


class GroupUpdate(Struct):
    """The `update_info` of weights over a process group."""

    names: list[str]
    dtypes: list[str]
    shapes: list[Annotated[list[Annotated[int, Meta(ge=0, lt=2**40)]], Meta(max_length=8)]]
    sha256: str

    def tensors(self) -> dict[str, Tensor]:
        """Tensors without memory of these names, shapes and dtypes.

        Raises:
            BadJson: if these are not weights.
        """
        if not len(self.names) == len(self.dtypes) == len(self.shapes) == len(set(self.names)):
            raise BadJson("update_info must have one dtype and one shape for each name")
        if not DTYPES.keys() >= set(self.dtypes) or any(math.prod(shape) >= 2**60 for shape in self.shapes):
            raise BadJson("update_info has a dtype or a shape that no weights have")
        every = zip(self.names, self.dtypes, self.shapes, strict=True)
        return {name: torch.empty(shape, dtype=DTYPES[dtype], device="meta") for name, dtype, shape in every}


def connect_to_sender(sender: Sender) -> Gloo:
    """The server's end of a group, to a sender.

    Raises:
        BadWeights: if the sender cannot be reached.
    """
    place = sender.address, sender.port
    try:
        socket.create_connection(place, REACH_SECONDS).close()  # the store would try again for all its time
        store = TCPStore(*place, PAIR, False, timeout=timedelta(seconds=sender.timeout_seconds))
        return make_group(store, RECEIVER, _own_address(*place), sender.timeout_seconds)
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


def read_weights(path: str, sha256: str, folders: Sequence[Path], most_bytes: int) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Args:
        path: from outside.
        sha256: checksum of the whole file, in hexadecimal digits.
        folders: the file must be below one of these; symbolic links are followed before this is checked.
        most_bytes: of its tensors.

    Raises:
        BadWeights: if the file is elsewhere, cannot be read, or is not what the checksum says.
    """
    try:
        real = Path(path).resolve(strict=True)
        if not any(folder.resolve() in real.parents for folder in folders):
            places = " or ".join(map(str, folders))
            raise BadWeights(f"weights are read from files below {places} alone: start the server with --folder")
        content = _read(real, most_bytes + LARGEST_HEADER)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        raise BadWeights(f"the file of the weights cannot be read ({type(error).__name__})") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BadWeights("the weights do not have the checksum that was announced")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        raise BadWeights("the file of the weights is not a safetensors file") from None


def _read(path: Path, most_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("no plain file")
        if len(content := file.read(most_bytes + 1)) > most_bytes:
            raise BadWeights("the file of the weights is larger than the served model")
        return content


def check_weights(staged: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Check that tensors fit a model's parameters: all of them, and nothing else. Those of `meta` have no numbers yet.

    Raises:
        BadWeights: naming the first tensor that is missing, unknown, of another shape or dtype, or not finite.
    """
    for name in own:
        if name not in staged:
            raise BadWeights(f"the weights have no tensor {name}: the server must serve the run's model")
    for name, tensor in staged.items():
        if name not in own:
            raise BadWeights(f"the weights have a tensor {name[:200]!r} that the served model does not have")
        for what, theirs, ours in (
            ("shape", tuple(tensor.shape), tuple(own[name].shape)),
            ("dtype", tensor.dtype, own[name].dtype),
        ):
            if theirs != ours:
                raise BadWeights(f"the tensor {name} has {what} {theirs}, the served model has {ours}")
        if not tensor.is_meta and not tensor.isfinite().all():
            raise BadWeights(f"the tensor {name} has numbers that are not finite (NaN or infinite)")


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16', 'float32'."""
    return str(dtype).removeprefix("torch.")
