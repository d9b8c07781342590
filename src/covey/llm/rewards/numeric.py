"""The reward `numeric`: the number of the completion is the right one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.read_number import number_pairs


def numeric(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """1 if the number in the completion (`read_number`) equals the one in the answer column exactly, else 0.

    Raises:
        ValueError: if the column is missing or an answer has no number.
    """
    pairs = number_pairs(completions, answer_column, columns)
    return [float(given == right) for given, right in pairs]
