"""Gathers the groups of all ranks, and checks that the ranks agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from covey.config import RunError, SamplerLost
from covey.data import Group, Start, Team, decode_groups, encode_groups
from covey.runtime.distributed import exchange_json
from covey.train.shards import shards_of, share

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


def _digest(starts: Sequence[Start]) -> bytes:
    """A hash of prompts and columns."""
    content = [[start.index, start.prompt, dict(start.columns)] for start in starts]
    return hashlib.sha256(json.dumps(content, default=str, sort_keys=True).encode()).digest()


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
