"""Gathers the groups of all ranks, and checks that the ranks agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
