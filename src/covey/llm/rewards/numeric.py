"""The reward `numeric`: the number of the completion is the right one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.read_number import number_pairs


def numeric(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """1 if the number in the completion (`read_number`) is exactly the one in the answer column, else 0.

    Raises:
        ValueError: if the column is missing or an answer is not one number.
    """
    pairs = number_pairs(completions, answer_column, columns)
    return [float(given is not None and given.equals(right)) for given, right in pairs]
