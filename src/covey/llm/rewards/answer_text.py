"""The text of a completion, the marked answer in it, and the columns of the data: helpers of the built-in rewards.

This file and those of the built-in rewards load neither torch nor transformers, because some of them run in a worker
process.
"""

from __future__ import annotations

import re
from typing import Any

_NO_COLUMNS = ("prompts", "completion_ids", "trainer_state", "log_metric", "log_extra")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*(?P<box>\{|[^\s{}$\\]+)|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$*]*(?:[,;]\s*(?:and\b|or\b)?|and\b|or\b|和|或)[\s$*]*")
_MOST_BOXES = 100  # that are one answer


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


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` that has one, with balanced braces; if it is not closed, the rest of its line.

    Boxes with only a comma, a semicolon, "and" or "or" between them are one answer, such as "3, 5".
    """
    boxes = [box for box in _boxes(text) if box[2].strip(" \n.?_")]
    if not boxes:
        return None
    begin, _, last = boxes.pop()
    contents = [last]
    for earlier, end, content in reversed(boxes[-_MOST_BOXES:]):
        if end > begin or not _BETWEEN_BOXES.fullmatch(text, end, begin):
            break
        begin, contents = earlier, [content, *contents]
    return ", ".join(dict.fromkeys(contents))


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Begin, end and content of each box, in the order in which they begin."""
    boxes = []
    opened: list[tuple[int, int]] = []  # begin of the box, or -1 for another brace, and of what is in it
    for match in _BRACE.finditer(text) if "box" in text else ():
        if match[0] == "}" and opened:
            begin, inside = opened.pop()
            boxes.append((begin, match.end(), text[inside : match.start()]))
        elif match[0] == "{" or match["box"] == "{":
            opened.append((-1 if match[0] == "{" else match.start(), match.end()))
        elif match["box"]:
            boxes.append((match.start(), match.end(), match["box"]))
    if opened:
        begin, inside = opened[-1]
        boxes.append((begin, len(text), text[inside:].lstrip().partition("\n")[0]))
    return sorted(box for box in boxes if box[0] >= 0)


def last_answer_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`; if it is not closed, the rest of the text."""
    found = _ANSWER_TAG.findall(text)
    return found[-1] if found else None
