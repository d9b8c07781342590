"""Publishes a policy's weights to servers. `FileTransport` writes a file that they read."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from covey.config import MachineError
from covey.llm.model.lora import merged_tensors
from covey.llm.remote import wire
from covey.llm.remote.client import Client, LostServer, OtherWeights

SHARED_MEMORY = Path("/dev/shm")


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


class Offer(Protocol):
    """Weights of one version, ready to be taken by any number of servers."""

    async def connect(self, client: Client) -> None:
        """Prepare the server to receive."""

    async def send(self, client: Client, label: Mapping[str, str]) -> None:
        """Let the server receive the weights; `label` are further fields of the body."""


class Transport(Protocol):
    """A way for weights to travel."""

    def offered(self, tensors: Mapping[str, Tensor], name: str) -> Any:
        """Context manager with the `Offer` of these tensors; `name` is their version."""


@dataclass(frozen=True)
class FileOffer:
    """A file of safetensors; implements `Offer`."""

    path: Path
    sha256: str

    async def connect(self, client: Client) -> None:
        await client.post(wire.INIT, {"init_info": {"folder": str(self.path.parent)}})

    async def send(self, client: Client, label: Mapping[str, str]) -> None:
        await client.post(wire.UPDATE, {"update_info": {"path": str(self.path), "sha256": self.sha256, **label}})


@dataclass(frozen=True)
class FileTransport:
    """Through a file that is removed when all servers have read it; implements `Transport`."""

    folder: str = ""  # empty: a private one

    @contextmanager
    def offered(self, tensors: Mapping[str, Tensor], name: str) -> Iterator[FileOffer]:
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


async def give(client: Client, offer: Offer, version: str, *, covey: bool) -> None:
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
    info = await client.get(wire.WEIGHT_INFO)
    if not isinstance(info, dict) or info.get("weight_version") != version:
        raise OtherWeights(f"{client.address} reports other weights than those that it was given")
