"""The reward `exact`: the completion is the right text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.answer_text import column_of, completion_text


def exact(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """1 if the completion is the answer, apart from white space at both ends; case and inner spaces matter.

    Raises:
        ValueError: if the column is missing.
    """
    answers = column_of(columns, answer_column)
    return [
        float(completion_text(completion).strip() == str(answer).strip())
        for completion, answer in zip(completions, answers, strict=True)
    ]
