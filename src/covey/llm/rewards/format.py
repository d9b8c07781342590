"""The reward `format`: the completion matches a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.answer_text import completion_text


def format_match(completions: Sequence[Any], *, pattern: str) -> list[float]:
    """1 if the regular expression matches the whole completion; a dot also matches a line end.

    A pattern may need exponential time for some completions, so the grader calls this in a process with a deadline.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(completion_text(completion)) is not None) for completion in completions]
