"""Logical shards: the division of a step's rows among the ranks. With one shard, all rows are in it.

Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from covey.data import Batch, Team


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


def shard_rows(batch: Batch, count: int, wanted_B: Tensor | None = None) -> list[Tensor]:
    """Row indices of each shard of the wanted rows (None: all), ascending.

    Groups stay whole, because siblings share prefixes. The longest group goes first, each to the shard with the
    fewest decisions so far, so that all ranks finish at about the same time. Ties go to the first group and the first
    shard, so every rank divides alike.
    """
    wanted = torch.arange(len(batch)) if wanted_B is None else wanted_B.nonzero()[:, 0]
    if count == 1:
        return [wanted]
    group_B = batch.group_B[wanted]
    decisions_G = torch.zeros(int(group_B.max()) + 1 if len(wanted) else 0, dtype=torch.int64)
    decisions_G.index_add_(0, group_B, batch.mask_BT[wanted].sum(dim=1))
    shard_of: dict[int, int] = {}
    loads = [0] * count
    for group in sorted(group_B.unique().tolist(), key=lambda one: (-int(decisions_G[one]), one)):
        shard_of[group] = loads.index(min(loads))
        loads[shard_of[group]] += int(decisions_G[group])
    shard_B = torch.tensor([shard_of[group] for group in group_B.tolist()], dtype=torch.int64)
    return [wanted[shard_B == shard] for shard in range(count)]


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
