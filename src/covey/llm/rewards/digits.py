"""The reward `digits`: partial credit for the digits of a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.read_number import Number, number_pairs


def digits(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """Fraction of the places of the right number, with its sign, that the given number has right.

    Partial credit: 157 for 156 gives 3/4 (sign and two digits), 31 for -31 gives 2/3. With `numeric` a group of wrong
    answers has no gradient; with this reward, answers with a right digit or sign have a higher advantage. Digits are
    aligned at the right and counted over the longer number, so that more digits give no more reward. Use it together
    with `numeric`, which remains the score.

    Raises:
        ValueError: if the column is missing or an answer is not one number.
    """
    return [_right_places(given, right) for given, right in number_pairs(completions, answer_column, columns)]


def _right_places(given: Number | None, right: Number) -> float:
    if given is None:
        return 0.0
    ours, theirs = str(abs(given.value))[::-1], str(abs(right.value))[::-1]
    same = sum(a == b for a, b in zip(ours, theirs, strict=False)) + ((given.value < 0) == (right.value < 0))
    return same / (1 + max(len(ours), len(theirs)))
