"""The text of a completion, the marked answer in it, and the columns of the data: helpers of the built-in rewards.

This file and those of the built-in rewards load neither torch nor transformers, because some of them run in a worker
process.
"""

from __future__ import annotations

import re
from typing import Any

_NO_COLUMNS = ("prompts", "completion_ids", "trainer_state", "log_metric", "log_extra")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")


def completion_text(completion: Any) -> str:
    """The text of a completion: the string itself, or the content of its chat messages; of a conversation the last turn
    of the model.
    """
    if isinstance(completion, str):
        return completion
    if len(completion) > 1:
        turns = [message for message in completion if message.get("role") == "assistant"]
        completion = turns[-1:] or completion
    return "".join(message["content"] for message in completion)


def column_of(columns: dict[str, Any], name: str) -> Any:
    """The column of the data that a reward reads.

    Raises:
        ValueError: if the data does not have it.
    """
    if name not in columns:
        there = ", ".join(name for name in columns if name not in _NO_COLUMNS) or "no column"
        raise ValueError(f"the data has no column {name!r}, it has {there}; set answer_column")
    return columns[name]


def marked_answer(text: str) -> str | None:
    """The answer that a text marks: the last `\\boxed{...}`, else `<answer>...</answer>`, else `#### ...`."""
    for last in (last_boxed, last_answer_tag, last_hashes):
        found = last(text)
        if found is not None:
            return found
    return None


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}`, with balanced braces."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin += len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def last_answer_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`."""
    return _last_group(_ANSWER_TAG, text)


def last_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`, which marks the answer in GSM8K."""
    return _last_group(_HASHES, text)


def _last_group(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1] if found else None
