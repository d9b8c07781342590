"""A nested state as a JSON document and safetensors files; a sharded tensor has a part in the file of every rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.runtime.sharding import borders_of, is_sharded, local

_REFERENCE = "$tensor"  # {"$tensor": name} in the document refers to a tensor
_ROWS = "rows"  # beside it, for a sharded tensor: the first row of every part, and the number of all rows

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


def take_out_tensors(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` in JSON's types, with each tensor moved to `tensors` and replaced by a reference."""
    if isinstance(value, Tensor):
        if value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
            raise TypeError(f"cannot store {where}: tensor of {value.dtype}, {value.layout}")
        if where in tensors:
            raise ValueError(f"two tensors of the state have the path {where}: rename a key that contains '/'")
        tensors[where] = value
        return {_REFERENCE: where} | ({_ROWS: borders_of(value)} if is_sharded(value) else {})
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _REFERENCE:
                raise TypeError(f"cannot store the key {key!r} of {where or 'the state'}: keys are strings")
        return {k: take_out_tensors(v, f"{where}/{k}" if where else k, tensors) for k, v in value.items()}
    if isinstance(value, list):
        if any(isinstance(item, Tensor) for item in value):
            raise TypeError(f"cannot store {where}: tensors stand in dicts, not in lists")
        return [take_out_tensors(item, f"{where}/{index}", tensors) for index, item in enumerate(value)]
    # The exact type, because subclasses and tuples would be loaded as another type.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"cannot store {where}: {type(value).__name__} is not a tensor, number, string, bool, None or list")


class SavedParts:
    """A sharded tensor in the files of the ranks that wrote it. A slice of its rows reads only these."""

    def __init__(self, slices: Sequence[Any], first_rows: Sequence[int]) -> None:
        """
        Args:
            slices: safetensors' slice of the tensor in the file of every rank.
            first_rows: of every part, and the number of all rows.
        """
        if list(first_rows) != sorted(first_rows) or len(first_rows) != len(slices) + 1:
            raise ValueError(f"{len(slices)} parts have the rows {first_rows}")
        self.slices, self.first_rows = slices, first_rows
        self.shape = torch.Size([first_rows[-1], *slices[0].get_shape()[1:]])

    def __getitem__(self, rows: slice) -> Tensor:
        begin, end, _ = rows.indices(self.first_rows[-1])
        found = [
            part[max(begin - first, 0) : min(end, last) - first]
            for part, (first, last) in zip(self.slices, pairwise(self.first_rows), strict=True)
            if max(begin, first) < min(end, last)
        ]
        return torch.cat(found) if found else self.slices[0][0:0]


def put_in_tensors(value: Any, files: Sequence[Any]) -> Any:
    """The state of a document. Tensors that are not sharded are in the first file; the others become `SavedParts`.

    Args:
        files: open safetensors files of the ranks, in their order.
    """
    if isinstance(value, dict):
        if _REFERENCE in value:
            name = value[_REFERENCE]
            if _ROWS in value:
                return SavedParts([file.get_slice(name) for file in files], value[_ROWS])
            return files[0].get_tensor(name)
        return {key: put_in_tensors(item, files) for key, item in value.items()}
    if isinstance(value, list):
        return [put_in_tensors(item, files) for item in value]
    return value


def refuse_shared(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tied weights.

    Raises:
        ValueError: if two names hold the same tensor.
    """
    owners: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        rows = local(tensor)
        if rows.numel() == 0:
            continue
        owner = owners.setdefault((rows.device, rows.data_ptr()), name)
        if owner != name:
            raise ValueError(f"{owner} and {name} are the same tensor (tied weights): store it once")


def safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Generate a safetensors file piece by piece, without a second copy of the state; of sharded tensors this rank's
    rows.

    The format: length of the header (8 bytes, little endian), header (JSON, padded with spaces), the tensors' bytes.
    """
    header: dict[str, Any] = {}
    end = 0
    # Wide types first keeps every tensor aligned to its item size, like other writers of the format.
    own = {name: local(tensor) for name, tensor in tensors.items()}
    ordered = sorted(own.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    document = json.dumps(header).encode()
    document += b" " * (-len(document) % 8)
    yield len(document).to_bytes(8, "little")
    yield document
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and fsync a file; returns its size and hash for the manifest."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
