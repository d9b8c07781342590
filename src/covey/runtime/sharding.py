"""Which rows of a model's weights this rank has: all, or its part of weights that `runtime/fsdp.py` has divided.

A divided tensor is a DTensor. Its class is not imported here, because its module takes a second to import and runs of
one process never need it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Weights:
    """The division of one model's weights among the ranks; in this class every rank has all weights."""

    def dtype_of(self, module: nn.Module) -> torch.dtype:
        """The dtype in which a module computes with the weights."""
        return next(module.parameters()).dtype

    def run(self, compute: Callable[[], T]) -> T:
        """Call a function that reads the weights. It returns tensors, or a dict or tuple of them."""
        return compute()

    def gathered(self) -> AbstractContextManager[None]:
        """Context in which each rank has all weights as plain tensors. Every rank enters it."""
        return nullcontext()

    def reshard(self) -> None:
        """Free gathered weights, because the weights have changed or are not needed."""

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """The whole weights and the persistent buffers of a module, as it computes with them. Every rank calls it; the
        result is that of rank 0 only.
        """
        return module.state_dict()

    def before_last_pass(self) -> None:
        """The next backward pass is the last of a logical shard."""

    def end_shard(self) -> None:
        """The backward passes of a logical shard are done."""

    def whole_rows(self, local: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """One number for each row of some parameters, from the ranks that have the rows. Every rank calls it.

        Args:
            local: for each parameter the numbers of the rows of this rank, fp64.
            rows: the number of rows of each parameter.
        """
        return list(local)


WHOLE = Weights()


class SavedRows(Protocol):
    """A saved tensor that is read by rows."""

    def __getitem__(self, rows: slice) -> Tensor:
        """Some rows."""


def part_of(rows: int, rank: int, ranks: int) -> slice:
    """The rows of a rank, as `torch.chunk` and FSDP2 divide them."""
    each = -(-rows // ranks)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank has some rows of the tensor only, so that it is a DTensor."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """The rows of this rank, in the memory of the tensor; the tensor itself if it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    divided: Any = tensor
    with torch.no_grad():
        rows: Tensor = divided.to_local()
    return rows


def with_local(like: Tensor, rows: Tensor) -> Tensor:
    """A tensor that is divided as `like` and has these rows on this rank; `rows` if `like` is not sharded."""
    if not is_sharded(like):
        return rows
    divided: Any = like
    shape = (len(like), *rows.shape[1:])
    whole: Tensor = type(divided).from_local(
        rows, divided.device_mesh, divided.placements, run_check=False, shape=torch.Size(shape), stride=rows.stride()
    )
    return whole


def borders_of(tensor: Tensor) -> list[int]:
    """The first row of every rank, and the number of all rows."""
    divided: Any = tensor
    rows, ranks = len(tensor), divided.device_mesh.size()
    return [*(part_of(rows, rank, ranks).start for rank in range(ranks)), rows]


def own_rows(saved: Tensor | SavedRows, like: Tensor) -> Tensor:
    """The rows of a saved tensor that this rank has of `like`; all rows if `like` is not sharded."""
    if not is_sharded(like):
        return saved if isinstance(saved, Tensor) else saved[:]
    divided: Any = like
    mesh = divided.device_mesh
    return saved[part_of(len(like), mesh.get_local_rank(), mesh.size())]
