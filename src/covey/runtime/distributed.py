"""Teams: the ranks (processes) that train one policy together, started by torchrun.

The rows of a step are divided into logical shards. Each rank samples, evaluates and differentiates its own shards.
Every sum over rows is first taken within a shard and then over shards, in the order of a binary tree. So a result
depends on the number of shards and not on that of the ranks.
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from covey.config import RunError, SamplerLost
from covey.config.fields import plural
from covey.data import Batch, Group, Start, Team, TrainingExample, decode_groups, encode_groups
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


# ---- weights that the ranks divide ----

# A rank has all rows of a model's weights, or its part, if `runtime/fsdp.py` has divided them. A divided tensor is a
# DTensor. Its class is not imported here, because its module takes a second to import and runs of one process never
# need it.


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


# ---- groups and rows of all ranks ----

Example = TypeVar("Example", bound=TrainingExample)

_DIGEST = 32  # bytes of a SHA-256


def gather_groups(groups: Sequence[Group], starts: Sequence[Start], team: Team, when: str) -> list[Group]:
    """The graded groups of all ranks, in the order of the starts.

    Args:
        groups: of this rank's shards.
        starts: of all ranks.
        team: the ranks; each calls this.
        when: for the message of an error.

    Raises:
        RunError: on every rank, if a rank has drawn other starts.
    """
    found = team.exchange(_digest(starts) + encode_groups(groups))
    for rank, message in enumerate(found):
        if message[:_DIGEST] != found[0][:_DIGEST]:
            raise RunError(
                f"rank {rank} has drawn other prompts than rank 0 in {when}: data files, packages and the task's code "
                "must be the same on all ranks, and a task must not use random numbers of its own"
            )
    parts = share(len(starts), team)
    return [
        group
        for rank, message in enumerate(found)
        for group in decode_groups(
            message[_DIGEST:], [start for shard in shards_of(rank, team) for start in starts[parts[shard]]]
        )
    ]


def check_agreement(groups: Sequence[Group], facts: Mapping[str, Any], team: Team, when: str) -> None:
    """Compare the rollouts of a step and other numbers that must be the same on all ranks.

    Args:
        groups: of the step; the lengths and the rewards of their rollouts are compared.
        facts: further numbers by their description.
        team: the ranks; each calls this.
        when: for the message of an error.

    Raises:
        RunError: on every rank, naming the first that differs from rank 0.
    """
    if team.size == 1:
        return
    rollouts = [[group.start.index, [[one.decisions, one.reward] for one in group.rollouts]] for group in groups]
    own = {f"rollouts of start {index}": content_hash(content) for index, content in rollouts}
    own |= {name: repr(value) for name, value in facts.items()}
    first, *others = exchange_json(team, own)
    for rank, other in enumerate(others, 1):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                raise RunError(
                    f"rank {rank} has another result than rank 0 in {when} ({name}): all ranks need the same versions "
                    "of covey and torch and processors with the same instructions; if they have, the memory of one is "
                    "faulty. The run goes on from its last checkpoint"
                )


def _digest(starts: Sequence[Start]) -> bytes:
    """A hash of prompts and columns."""
    content = [[start.index, start.prompt, dict(start.columns)] for start in starts]
    return bytes.fromhex(content_hash(content))


def content_hash(content: Any) -> str:
    """SHA-256 of JSON data, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, default=str, sort_keys=True).encode()).hexdigest()


@contextmanager
def lost_together(team: Team) -> Iterator[None]:
    """Context manager in which a `SamplerLost` of one rank is raised on all, so that they write a checkpoint together.
    Every rank must use it.
    """
    try:
        yield
    except SamplerLost as error:
        exchange_json(team, str(error))
        raise
    for message in filter(None, exchange_json(team, "")):
        raise SamplerLost(message)


def shard_rows(batch: Batch, count: int, wanted_B: Tensor | None = None) -> list[Tensor]:
    """Row indices of each shard of the wanted rows (None: all), ascending.

    Groups stay whole, because siblings share prefixes. The longest group goes first, each to the shard with the
    fewest decisions so far, so that all ranks finish at about the same time. Ties go to the first group and the first
    shard, so every rank divides alike.
    """
    wanted = torch.arange(len(batch)) if wanted_B is None else wanted_B.nonzero()[:, 0]
    if count == 1:
        return [wanted]
    shard_B = torch.tensor(_shards(batch.group_B[wanted].tolist(), batch.mask_BT[wanted].sum(dim=1).tolist(), count))
    return [wanted[shard_B == shard] for shard in range(count)]


def shard_examples(examples: Sequence[Example], count: int) -> list[list[Example]]:
    """The examples of each shard, as `shard_rows` divides rows; those with the same prompt are a group."""
    numbers: dict[Hashable, int] = {}
    groups = [numbers.setdefault(one.content, len(numbers)) for one in examples]
    shards = _shards(groups, [one.tokens for one in examples], count)
    return [[one for one, shard in zip(examples, shards, strict=True) if shard == number] for number in range(count)]


def _shards(groups: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """The shard of each item, by the number of its group and its size."""
    totals: dict[int, int] = {}
    for group, size in zip(groups, sizes, strict=True):
        totals[group] = totals.get(group, 0) + size
    shard_of: dict[int, int] = {}
    loads = [0] * count
    for group in sorted(totals, key=lambda one: (-totals[one], one)):
        shard_of[group] = loads.index(min(loads))
        loads[shard_of[group]] += totals[group]
    return [shard_of[group] for group in groups]


def shortest_row(batch: Batch) -> Tensor:
    """The index of the row with the fewest tokens, [1]: that of a pass whose result is not used."""
    tokens_B = batch.mask_BT.sum(dim=1) + torch.tensor([len(context) for context in batch.context])
    return tokens_B.argmin()[None]


def fill_rows(value_B: Tensor, shards: Sequence[Tensor], team: Team) -> None:
    """Copy the rows of every shard, in place, from the rank that has computed them. Every rank must call it.

    Args:
        value_B: [B, ...], right at the rows of this rank's shards.
        shards: row indices of each shard.
    """
    if team.size == 1:
        return
    owned = [torch.cat([shards[shard] for shard in shards_of(rank, team)]) for rank in range(team.size)]
    message = value_B[owned[team.rank]].contiguous().numpy().tobytes()
    for rows, received in zip(owned, team.exchange(message), strict=True):
        array = np.frombuffer(bytearray(received), dtype=value_B.numpy().dtype)
        value_B[rows] = torch.from_numpy(array).view(len(rows), *value_B.shape[1:])
