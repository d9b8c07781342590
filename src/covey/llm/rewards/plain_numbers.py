"""Grades answers that are plain numbers exactly, so that only the other answers of `math` need math-verify."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from covey.llm.rewards.answer_text import column_of, completion_text, marked_answer
from covey.llm.rewards.read_number import LONGEST_NUMBER

# math-verify rounds decimals to 6 places before it compares them. Numbers that differ by more are different for it too.
ROUNDING = Fraction(1, 10**5)

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]*+)?|\.[0-9]++"
_PLAIN = re.compile(
    rf"(?P<sign>[-+−]?)\s*(?:(?P<digits>{_DIGITS})|(?P<above>[0-9]++)\s*/\s*(?P<below>[0-9]++)"
    r"|\\[dt]?frac\s*\{\s*(?P<latex_above>[0-9]++)\s*\}\s*\{\s*(?P<latex_below>[0-9]++)\s*\})\.?"
)
_LAST_SENTENCE = re.compile(r"\banswer\s*(?:is|:|=)[\s:*]*(?P<answer>[^\s*]+)[\s*]*\Z", re.IGNORECASE)


def plain_verdicts(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float | None]:
    """1 or 0 if both the answer of a completion and the right one are plain numbers, else None: ask math-verify.

    Raises:
        ValueError: if the column is missing.
    """
    return [
        _verdict(completion_text(completion), str(answer))
        for completion, answer in zip(completions, column_of(columns, answer_column), strict=True)
    ]


def plain_number(text: str) -> Fraction | None:
    """The number that a text is: an integer, a decimal or a fraction of integers; None for anything else.

    Accepts thousands' commas, `\\frac{3}{4}`, one full stop at the end and dollar signs around it.
    """
    text = text.strip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    match = _PLAIN.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None:
        return None
    above, below = match["above"] or match["latex_above"], match["below"] or match["latex_below"]
    if above is not None and not int(below):
        return None
    number = Fraction(int(above), int(below)) if above is not None else Fraction(match["digits"].replace(",", ""))
    return -number if match["sign"] in ("-", "−") else number


def _verdict(text: str, answer: str) -> float | None:
    marked = marked_answer(text)
    if marked is None:
        said = _LAST_SENTENCE.search(text[-200:])
        marked = said["answer"].removesuffix(".") if said else text
    gold = marked_answer(answer)
    right, given = plain_number(answer if gold is None else gold), plain_number(marked)
    if right is None or given is None:
        return None
    if given == right:
        return 1.0
    whole = right.denominator == given.denominator == 1
    return 0.0 if whole or abs(given - right) > ROUNDING else None
