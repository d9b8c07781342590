"""How a batch is cut into microbatches."""

from collections.abc import Sequence
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.llm.model.prefix_attention import Row, order_rows, split_rows


def uniform(groups: int, size: int, prompt: int, completion: int) -> list[Row]:
    tokens = prompt + completion
    return [Row(n, n // size, tokens, prompt if n % size else 0) for n in range(groups * size)]


def fed(piece: Sequence[Row]) -> int:
    """The first of a piece has nothing before it."""
    return piece[0].tokens + sum(row.tokens - row.shared for row in piece[1:])


@pytest.mark.parametrize(
    ("shape", "limit", "sizes"),
    [
        (
            (8, 8, 100, 128),
            4096,
            [3372, 3372, 2248],
        ),  # three whole groups are less than full, and no prompt is fed twice
        ((4, 8, 100, 128), 4096, [2248, 2248]),  # not 4096 and the rest
        ((8, 16, 1000, 10), 4096, [3480, 3480, 2320]),
        ((4, 8, 64, 128), 2048, [1536, 1536, 1408]),  # by whole groups there would be four
        ((2, 32, 64, 48), 1024, [832, 832, 832, 832]),  # a group is too large
        ((16, 16, 50, 12), 4096, [3872]),
        ((3, 4, 19, 10), 1, [29] * 12),
        ((0, 4, 19, 10), 100, []),
    ],
)
def test_by_hand(shape, limit, sizes):
    pieces = split_rows(uniform(*shape), limit)
    assert [fed(piece) for piece in pieces] == sizes


GROUP = st.tuples(
    st.integers(1, 30), st.lists(st.tuples(st.integers(1, 30), st.integers(0, 29)), min_size=1, max_size=5)
)


@given(st.lists(GROUP, min_size=1, max_size=6), st.integers(1, 150))
def test_pieces_hold_every_row_once_are_few_and_of_similar_size(groups, limit):
    rows: list[Row] = []
    for number, (prompt, completions) in enumerate(groups):
        for place, (length, common) in enumerate(completions):
            known = prompt + min(common, length) if place else 0
            rows.append(Row(len(rows), number, prompt + length, known))
    pieces = split_rows(rows, limit)
    assert [row for piece in pieces for row in piece] == rows
    assert all(fed(piece) <= limit or len(piece) == 1 for piece in pieces)

    def filled(size: int) -> list[list[Row]]:
        """Row by row, as many as go in."""
        found: list[list[Row]] = []
        for row in rows:
            if not found or fed([*found[-1], row]) > size:
                found.append([])
            found[-1].append(row)
        return found

    assert len(pieces) <= len(filled(limit))
    whole = [list(members) for _, members in groupby(rows, key=lambda row: row.group)]
    cuts = sum(len({piece[-1].group, following[0].group}) == 1 for piece, following in pairwise(pieces))
    if cuts and all(fed(group) <= limit for group in whole):
        largest = max(map(fed, pieces))
        assert all(len(filled(size)) > len(pieces) for size in range(1, largest) if max(map(fed, filled(size))) <= size)
        together, tokens = 1, 0
        for group in whole:
            if tokens + fed(group) > limit:
                together, tokens = together + 1, 0
            tokens += fed(group)
        assert together > len(pieces), "a group was cut for nothing"


def test_neighbours_have_most_in_common():
    written = [[3, 4, 5], [9], [3, 4], [3, 7], [9]]
    rows = order_rows([0, 1, 0, 0, 1], [10, 6, 10, 10, 6], written)
    assert [(row.number, row.group, row.tokens, row.shared) for row in rows] == [
        (1, 1, 7, 0),  # the shorter group first
        (4, 1, 7, 7),
        (2, 0, 12, 0),
        (0, 0, 13, 12),
        (3, 0, 12, 11),
    ]
