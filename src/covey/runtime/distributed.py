"""Teams: the ranks (processes) that train one policy together, started by torchrun.

The rows of a step are divided into logical shards. Each rank samples, evaluates and differentiates its own shards.
Every sum over rows is first taken within a shard and then over shards, in the order of a binary tree. So a result
depends on the number of shards and not on that of the ranks.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from covey.config import RunError
from covey.config.fields import plural
from covey.data import Team
from covey.runtime.variables import STATE, local_rank, own_rank, world_size

T = TypeVar("T")

BUCKET = 1 << 24  # numbers that are summed in one message: 64 MB in fp32
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")  # gloo's errors
LONGEST_WAIT = timedelta(hours=2)  # for the slowest rank, whose sampling and grading have deadlines of their own


ALONE = Team()


def shards_of(rank: int, team: Team) -> range:
    """The shards of a rank."""
    each = team.shards // team.size
    return range(rank * each, (rank + 1) * each)


def own_shards(team: Team) -> range:
    """The shards of this rank."""
    return shards_of(team.rank, team)


def share(items: int, team: Team) -> list[slice]:
    """Consecutive parts of a list of `items`, one for each shard; their lengths differ by one at the most."""
    ends = [items * shard // team.shards for shard in range(team.shards + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def passes_over(parts: Sequence[T], idle: Callable[[], T], team: Team) -> list[tuple[T, bool]]:
    """The passes of this rank over its parts, each with True. A rank with fewer parts than another one makes further
    passes over the result of `idle`, with False: they must change nothing. Every rank must call it.
    """
    missing = team.passes(len(parts)) - len(parts)
    return [(part, True) for part in parts] + ([(idle(), False)] * missing if missing else [])


class TorchTeam(Team):
    """The ranks of torch.distributed, each with all weights."""

    def __init__(self, shards: int) -> None:
        """`shards` is a multiple of the number of ranks, and both are powers of two."""
        self.rank, self.size, self.shards = dist.get_rank(), dist.get_world_size(), shards

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order.

        Raises:
            RunError: if another rank has ended.
        """
        with _lost_ranks(self.rank):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(message)]))
            longest = int(max(sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(message)] = torch.from_numpy(np.frombuffer(bytearray(message), dtype=np.uint8))
            received = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(received, padded)
        return [row[: int(size)].numpy().tobytes() for row, size in zip(received, sizes, strict=True)]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of all ranks in place: (rank 0 + rank 1) + (rank 2 + rank 3), and so on. All have one dtype.

        Raises:
            RunError: if another rank has ended.
        """
        if not tensors:
            return
        buckets = list(_buckets(tensors))
        widths = [-(-sum(tensor.numel() for tensor in bucket) // self.size) for bucket in buckets]
        # All buckets use the same memory, because the first use of new memory takes longer than the addition.
        own, others = (tensors[0].new_empty(max(widths) * self.size) for _ in range(2))
        with _lost_ranks(self.rank):
            for bucket, width in zip(buckets, widths, strict=True):
                self._sum_bucket(bucket, own[: width * self.size], others[: width * self.size])

    def _sum_bucket(self, bucket: Sequence[Tensor], own: Tensor, others: Tensor) -> None:
        """A reduce-scatter whose order of addition is that of a binary tree, then an all-gather.

        `own` and `others` have room for the tensors, rounded up to a multiple of the number of ranks.
        """
        sizes = [tensor.numel() for tensor in bucket]
        *places, rest = own.split([*sizes, own.numel() - sum(sizes)])
        for place, tensor in zip(places, bucket, strict=True):
            place.copy_(tensor.reshape(-1))
        rest.zero_()
        dist.all_to_all_single(others, own)  # now this rank's part, of every rank
        summed = add_in_tree(list(others.view(self.size, -1)))
        dist.all_gather(list(own.view(self.size, -1)), summed)
        for place, tensor in zip(places, bucket, strict=True):
            tensor.copy_(place.view_as(tensor))


class ShardedTeam(TorchTeam):
    """Ranks with sharded weights, which make their passes over microbatches together."""

    def passes(self, own: int) -> int:
        """The most of all ranks, and at least one."""
        return max(1, *exchange_json(self, own))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of at most `BUCKET` numbers together; a larger one is alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(one.numel() for one in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def add_in_tree(rows: list[Tensor]) -> Tensor:
    """(row 0 + row 1) + (row 2 + row 3), and so on; their number is a power of two. Writes into the rows."""
    while len(rows) > 1:
        rows = [rows[i].add_(rows[i + 1]) for i in range(0, len(rows), 2)]
    return rows[0]


@contextmanager
def _lost_ranks(rank: int) -> Iterator[None]:
    """Context manager that turns torch's error about a lost connection into one line."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(rank) from error


def _lost(rank: int) -> RunError:
    return RunError(
        f"rank {rank} has lost another rank, which has ended or does not answer; its own message has the cause. "
        "The run goes on from its last checkpoint"
    )


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Context manager that connects the ranks that torchrun has started: tensors on CPUs by gloo, on GPUs by NCCL. Each
    rank of a machine uses the GPU of its local rank. No effect without torchrun, or if a script has connected them.
    """
    if world_size() == 1 or dist.is_initialized():
        yield
        return
    if local_rank() < torch.cuda.device_count():  # else the ranks compute on the CPU, or `choose_device` refuses them
        torch.cuda.set_device(local_rank())
    dist.init_process_group(timeout=LONGEST_WAIT)
    STATE.joined = True
    try:
        yield
    except RuntimeError as error:  # from a message between ranks within FSDP2's forward or backward pass
        if isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST):
            raise _lost(own_rank()) from error
        raise
    finally:
        dist.destroy_process_group()


def team_of(shards: int, *, sharded: bool = False) -> Team:
    """The team of this process. Call it within `joined_ranks`.

    Args:
        shards: logical shards; 0: as many as there are ranks.
        sharded: the ranks divide the weights. One rank has nothing to divide.
    """
    size = world_size()
    if size == 1:
        return Team(shards or 1)
    return (ShardedTeam if sharded else TorchTeam)(shards or size)


def describe_team(team: Team) -> str:
    """For the first line of a run; empty without shards."""
    if team.shards == 1:
        return ""
    weights = "weights sharded by FSDP2 (fully_shard)" if isinstance(team, ShardedTeam) else "each rank has all weights"
    return f"; {plural(team.size, 'rank')}, {team.shards} shards, {weights}"


class GradientTree:
    """Adds the gradients of shards in the order of a binary tree, in as many copies as the tree is high.

    Shard 0 is added to 1, 2 to 3, their sums to each other, and so on. The shards of a rank are consecutive and their
    number is a power of two, so the sum over ranks continues the same tree.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []  # height in the tree -> sums, the highest first

    @property
    def added(self) -> int:
        """The number of shards that were added since the last total."""
        return sum(1 << height for height, _ in self._sums)

    @staticmethod
    def copies(shards: int) -> int:
        """Number of copies of the gradients, besides those of the shard that is computed; `shards` of this rank."""
        return shards.bit_length() - 1

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the next shard; they are copied or only read."""
        height, sums = 0, list(gradients)
        while self._sums and self._sums[-1][0] == height:
            _, left = self._sums.pop()
            for total, right in zip(left, sums, strict=True):
                total.add_(right)
            height, sums = height + 1, left
        self._sums.append((height, sums if height else [gradient.clone() for gradient in gradients]))

    def total(self) -> list[Tensor]:
        """The sum over all shards that were added; empties the tree."""
        ((_, sums),) = self._sums
        self._sums = []
        return sums


def exchange_json(team: Team, value: Any) -> list[Any]:
    """The JSON values of all ranks, in their order. Every rank must call it."""
    return [value] if team.size == 1 else [json.loads(one) for one in team.exchange(json.dumps(value).encode())]


def of_all_shards(team: Team, own: Sequence[Any]) -> list[Any]:
    """The JSON values of all shards, in their order; `own` belong to those on this rank. Every rank must call it."""
    return [value for values in exchange_json(team, list(own)) for value in values]


def asked_any(team: Team, asked: Callable[[], bool]) -> bool:
    """Whether a rank was asked to stop. Every rank must call it, so that all stop after the same step."""
    return any(exchange_json(team, asked()))
