"""A batch in pieces that fit into memory: each has a forward and a backward pass of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from covey.llm.model.prefix_tree import common_prefix_length


@dataclass(frozen=True)
class Row:
    """A rollout, and what feeding it costs."""

    number: int
    group: int
    tokens: int  # of its prompt and its actions up to the last decision
    known: int  # of these, how many it begins with like the row before, of the same group: they are fed once


def in_order(groups: Sequence[int], prompt_lengths: Sequence[int], written: Sequence[Sequence[int]]) -> list[Row]:
    """The rows of a batch so that neighbours have most in common.

    Groups of similar length go together, so that little of a padded attention rectangle is wasted. Those of a group are
    ordered by their tokens: then a row has nothing in common with another but what the one before has too.
    """
    longest: dict[int, int] = {}
    for group, actions in zip(groups, written, strict=True):
        longest[group] = max(len(actions), longest.get(group, 0))
    numbers = sorted(range(len(groups)), key=lambda row: (longest[groups[row]], groups[row], written[row], row))
    rows: list[Row] = []
    for number in numbers:
        known = 0
        if rows and rows[-1].group == groups[number]:
            known = prompt_lengths[number] + common_prefix_length(written[rows[-1].number], written[number])
        rows.append(Row(number, groups[number], prompt_lengths[number] + len(written[number]), known))
    return rows


def cut(rows: Sequence[Row], limit: int) -> list[list[Row]]:
    """Pieces of at most `limit` tokens, or of one row: as few as can be, and then as equal as can be, for the largest
    decides how much memory is needed. Where that makes no more pieces no group is cut: its prompt would be fed again.
    """
    groups = [list(members) for _, members in groupby(rows, key=lambda row: row.group)]
    by_groups, anywhere = (len(_filled(groups, limit, whole_groups)) for whole_groups in (True, False))
    whole_groups = by_groups <= anywhere
    fitting = [size for size in map(_fed, groups) if whole_groups and size <= limit]
    enough = bisect_left(
        range(limit),
        True,
        lo=max(fitting, default=0),
        key=lambda size: len(_filled(groups, size, whole_groups)) <= min(by_groups, anywhere),
    )
    return _filled(groups, enough, whole_groups)


def _fed(group: Sequence[Row]) -> int:
    return sum(row.tokens - row.known for row in group)


def _filled(groups: Sequence[Sequence[Row]], limit: int, whole_groups: bool) -> list[list[Row]]:
    """Pieces that end where the next row does not fit; or before that where its group does not, but would alone."""
    pieces: list[list[Row]] = []
    tokens = 0
    for group in groups:
        new_piece = whole_groups and tokens + _fed(group) > limit >= _fed(group)
        for row in group:
            new = row.tokens - row.known
            if not pieces or new_piece or tokens + new > limit:
                pieces.append([])
                tokens, new, new_piece = 0, row.tokens, False
            pieces[-1].append(row)
            tokens += new
    return pieces
