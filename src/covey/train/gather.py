"""Gathers the groups of all ranks, and checks that the ranks agree."""

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from covey.config import RunError, SamplerLost
from covey.data import Batch, Group, Start, Team, TrainingExample, decode_groups, encode_groups
from covey.runtime.distributed import exchange_json, shards_of, share

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
