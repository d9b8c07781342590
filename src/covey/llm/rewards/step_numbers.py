"""The reward `step_numbers`: every reasoning step has the right intermediate result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.answer_text import column_of
from covey.llm.rewards.read_number import Number, read_number, right_number


def step_numbers(
    completions: Sequence[Any], steps: Sequence[Sequence[str]], *, answer_column: str = "answer", **columns: Any
) -> list[list[float]]:
    """For each step 1 if its number (`read_number`) equals the one at its position in the answer column, else 0.

    The column has a list of the right intermediate results. A step beyond the list gets 0.

    Raises:
        ValueError: if the column is missing, or has a value that is not a list of numbers (`right_number`).
    """
    return [
        [float(number < len(right) and _is_right(text, right[number])) for number, text in enumerate(texts)]
        for texts, right in zip(steps, map(right_steps, column_of(columns, answer_column)), strict=True)
    ]


def _is_right(text: str, right: Number) -> bool:
    given = read_number(text)
    return given is not None and given.equals(right)


def right_steps(answers: Any) -> list[Number]:
    """The right number of each step. Raises ValueError for an answer that is not a list of numbers."""
    if not isinstance(answers, (list, tuple)):
        raise ValueError(
            f"the answer {str(answers)!r:.60} is not a list: set answer_column to a column with a number for each step"
        )
    return [right_number(str(answer)) for answer in answers]
