"""How weights reach a worker: received whole and verified, before anything is done with them."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

from covey_vllm.checkpoint import BadWeights, Expected

FOLDERS = "COVEY_WEIGHTS_FOLDERS"  # environment variable: below these folders files are read; separated by os.pathsep


def allowed_folders() -> tuple[Path, ...]:
    """The folders below which files with weights may be. Fixed when the server is started, so that a client that has
    the access token cannot make the server read other files.
    """
    return tuple(Path(folder).resolve() for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder)


class FileInfo(Protocol):
    """A file of weights, as a client announces it."""

    path: str
    sha256: str  # of the whole file, in hexadecimal digits


class GroupInfo(Protocol):
    """Weights that follow over a process group, as a client announces them."""

    names: list[str]  # in the order in which they are sent
    dtypes: list[str]  # of each, such as "bfloat16"
    shapes: list[list[int]]  # of each
    sha256: str  # of the bytes of all tensors, one after the other, in hexadecimal digits


@dataclass(frozen=True)
class FileTransport:
    """Reads files below one folder."""

    folder: Path

    @classmethod
    def below(cls, folder: str, allowed: Sequence[Path]) -> FileTransport:
        """The transport for a folder that a client names.

        Raises:
            BadWeights: if it is not one of the allowed folders or below one, links followed.
        """
        real = Path(folder).resolve()
        if not any(own in (real, *real.parents) for own in allowed):
            places = " or ".join(map(str, allowed)) or "no folder"
            raise BadWeights(f"weights are read from files below {places} alone: start the server with --folder")
        return cls(real)

    def receive(self, info: FileInfo, expected: Expected) -> dict[str, Tensor]:
        """The tensors in a file. Symbolic links are followed before the folder is checked.

        Raises:
            BadWeights: if the file is elsewhere or cannot be read, or its content is not what it must be.
        """
        try:
            real = Path(info.path).resolve(strict=True)
            if self.folder not in real.parents:
                raise BadWeights(f"weights are read from files below {self.folder} alone")
            # A link may have been put there since, and a pipe would never end.
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise BadWeights("the file of the weights is not a plain file")
                content = file.read()
        except BadWeights:
            raise
        except (OSError, RuntimeError, ValueError, TypeError) as error:  # RuntimeError: links that lead to each other
            raise BadWeights(f"the file of the weights cannot be read ({type(error).__name__})") from None
        if hashlib.sha256(content).hexdigest() != info.sha256:
            raise BadWeights("the weights do not have the checksum that was announced")
        try:
            tensors = load(content)
        except (SafetensorError, ValueError, KeyError, RuntimeError):
            raise BadWeights("the file of the weights is not a safetensors file") from None
        expected.check(tensors)
        return tensors


class GlooTransport:
    """Receives broadcasts of rank 0 of a gloo process group over TCP: the CPU's counterpart of vLLM's engine `nccl`.

    The connection is neither encrypted nor authenticated; it belongs on a private network.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_seconds: float) -> None:
        """Join the group of the store at this address; returns when all of its members have.

        Raises:
            BadWeights: if the store cannot be reached.
        """
        wait = timedelta(seconds=timeout_seconds)
        gloo: Any = ProcessGroupGloo  # torch declares few of its methods
        options = gloo._Options()
        options._timeout = wait
        try:
            options._devices = [gloo.create_device(hostname=own_address(address, port))]
            store = TCPStore(address, port, world_size, is_master=False, timeout=wait)
            self.group = gloo(store, rank, world_size, options)
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            raise BadWeights(f"the process group of the weights cannot be joined ({type(error).__name__})") from error

    def receive(self, info: GroupInfo, expected: Expected) -> dict[str, Tensor]:
        """The tensors of one version, broadcast in the order of their names.

        Raises:
            BadWeights: before anything is received if names, shapes or dtypes are not the model's, afterwards if the
                bytes are not those of the checksum, or numbers are not finite.
        """
        names, dtypes, shapes = info.names, info.dtypes, info.shapes
        if not all(isinstance(value, list) for value in (names, dtypes, shapes)):
            raise BadWeights("names, dtypes and shapes must be lists")
        expected.check_names(names)
        if not len(names) == len(dtypes) == len(shapes):
            raise BadWeights("names, dtypes and shapes have different lengths")
        kinds = [getattr(torch, kind, None) if isinstance(kind, str) else None for kind in dtypes]
        for name, shape, kind in zip(names, shapes, kinds, strict=True):
            expected.check_kind(name, tuple(shape), kind)  # type: ignore[arg-type]  # None is not a dtype of a model
        digest = hashlib.sha256()
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensor = torch.empty(expected.shapes[name], dtype=expected.dtype)
            self.group.broadcast(tensor, 0).wait()
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
            tensors[name] = tensor
        if digest.hexdigest() != info.sha256:
            raise BadWeights("the weights do not have the checksum that was announced")
        expected.check(tensors)
        return tensors


def own_address(address: str, port: int) -> str:
    """The address of this machine from which another is reached; no packet is sent. Loopback stays loopback."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])
