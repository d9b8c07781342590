"""Division of a batch into microbatches that fit into memory, with one forward and backward pass each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from covey.llm.model.prefix_tree import common_prefix_length


@dataclass(frozen=True)
class Row:
    """A row of a batch and the number of its tokens."""

    number: int  # index in the batch
    group: int
    tokens: int  # of its prompt and its actions up to the last decision
    shared: int  # length of the common prefix with the row before, if that is of the same group: it is fed once


def order_rows(groups: Sequence[int], prompt_lengths: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Row]:
    """Order the rows of a batch so that neighbours have long common prefixes.

    Groups are ordered by their longest completion, because rows of similar lengths need little padding. The rows of a
    group are in lexicographic order of their tokens: then the longest common prefix of a row is with its neighbour.

    Args:
        groups: group of each row.
        prompt_lengths: in tokens, of each row.
        completions: token ids of each row, up to its last decision.
    """
    longest: dict[int, int] = {}
    for group, actions in zip(groups, completions, strict=True):
        longest[group] = max(len(actions), longest.get(group, 0))
    numbers = sorted(range(len(groups)), key=lambda row: (longest[groups[row]], groups[row], completions[row], row))
    rows: list[Row] = []
    for number in numbers:
        shared = 0
        if rows and rows[-1].group == groups[number]:
            shared = prompt_lengths[number] + common_prefix_length(completions[rows[-1].number], completions[number])
        rows.append(Row(number, groups[number], prompt_lengths[number] + len(completions[number]), shared))
    return rows


def split_rows(rows: Sequence[Row], limit: int) -> list[list[Row]]:
    """Split ordered rows into microbatches of at most `limit` tokens, or of one row if it is longer.

    The number of microbatches is minimal. Then the largest is as small as possible, because it determines the memory.
    Groups stay whole if this needs no more microbatches, because the prompt of a split group is fed twice.
    """
    groups = [list(members) for _, members in groupby(rows, key=lambda row: row.group)]
    by_groups, by_rows = (len(_fill(groups, limit, whole_groups)) for whole_groups in (True, False))
    whole_groups = by_groups <= by_rows
    fitting = [size for size in map(_new_tokens, groups) if whole_groups and size <= limit]
    smallest = bisect_left(
        range(limit),
        True,
        lo=max(fitting, default=0),
        key=lambda size: len(_fill(groups, size, whole_groups)) <= min(by_groups, by_rows),
    )
    return _fill(groups, smallest, whole_groups)


def _new_tokens(group: Sequence[Row]) -> int:
    return sum(row.tokens - row.shared for row in group)


def _fill(groups: Sequence[Sequence[Row]], limit: int, whole_groups: bool) -> list[list[Row]]:
    """Fill microbatches greedily. With `whole_groups`, a group that fits into one microbatch is not split."""
    microbatches: list[list[Row]] = []
    tokens = 0
    for group in groups:
        new_piece = whole_groups and tokens + _new_tokens(group) > limit >= _new_tokens(group)
        for row in group:
            new = row.tokens - row.shared
            if not microbatches or new_piece or tokens + new > limit:
                microbatches.append([])
                tokens, new, new_piece = 0, row.tokens, False
            microbatches[-1].append(row)
            tokens += new
    return microbatches
