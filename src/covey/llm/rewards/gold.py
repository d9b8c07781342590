"""Checks of right answers before a run (`BuiltInReward.check`).

Each raises ValueError with the reason if no completion can be compared with the answer.
"""

from __future__ import annotations

import re
from typing import Any

from covey.llm.rewards.final_answer import final_answer
from covey.llm.rewards.read_number import right_number

_EMPTY_BOX = re.compile(r"\\boxed\{\s*\}")


def check_number(answer: Any) -> None:
    """Refuse an answer of `numeric` that is not one number."""
    right_number(_text(answer))


def check_expression(answer: Any) -> None:
    """Refuse an answer of `math` that math-verify cannot parse: an empty one, or one that closes a brace too many."""
    text = _text(answer)
    marked = final_answer(text, unmarked=False)
    inner, depth = _EMPTY_BOX.sub("", text if marked is None else marked).strip(" \t\n$"), 0
    for character in inner if "}" in inner else "":
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            break
    if not inner or depth < 0:
        raise ValueError(f"the right answer {text!r:.60} is not mathematics; use the exact reward for texts")


def check_text(answer: Any) -> None:
    """Refuse an answer of `exact` that is neither a text nor a number."""
    _text(answer)


def _text(answer: Any) -> str:
    if answer is None or isinstance(answer, (bool, list, tuple, dict)):
        raise ValueError(f"the right answer must be a text or a number, this is {str(answer)!r:.60}")
    return str(answer)
