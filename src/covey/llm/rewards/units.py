"""The units in which rewards measure a completion: tokens, words or characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.answer_text import completion_text


def units_of(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], unit: str) -> list[Sequence[Any]]:
    """The units of every completion: token ids (with the end token), words in lower case, or characters."""
    if unit == "tokens":
        return list(completion_ids)
    texts = [completion_text(completion) for completion in completions]
    return [text.lower().split() for text in texts] if unit == "words" else list(texts)
