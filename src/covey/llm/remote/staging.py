"""New weights on their way into a server: received and verified whole before a weight of the model is touched."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor


class BadWeights(Exception):
    """Weights that are refused; the message is one line."""


LARGEST_HEADER = 64 << 20  # bytes of a safetensors file beside its weights


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
        raise BadWeights("the file of the weights is no safetensors file") from None


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
