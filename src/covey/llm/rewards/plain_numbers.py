"""Grades answers that are numbers exactly, so that only the other answers of `math` need math-verify."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from covey.llm.rewards.answer_text import column_of, completion_text
from covey.llm.rewards.final_answer import final_answer
from covey.llm.rewards.read_number import is_relation, right_number, whole_number

# math-verify rounds decimals to 6 places before it compares them. Numbers that differ by more are different for it too.
ROUNDING = Fraction(1, 10**5)


def plain_verdicts(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float | None]:
    """1 or 0 if both the answer of a completion and the right one are numbers, else None: ask math-verify.

    Raises:
        ValueError: if the column is missing.
    """
    return [
        _verdict(completion_text(completion), str(answer))
        for completion, answer in zip(completions, column_of(columns, answer_column), strict=True)
    ]


def _verdict(text: str, answer: str) -> float | None:
    try:
        right = right_number(answer)
    except ValueError:
        return None
    stated = final_answer(text)
    given = whole_number(text if stated is None else stated)
    if given is None:
        return 0.0 if stated is not None and is_relation(stated) else None
    if given.equals(right):
        return 1.0
    whole = right.value.denominator == given.value.denominator == 1
    return 0.0 if whole or abs(given.value - right.value) > ROUNDING else None
