"""Reads the number that a text states as its answer, exactly and in a time bounded by the length of the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from covey.llm.rewards.answer_text import column_of, completion_text, last_answer_tag, last_boxed, last_hashes

LONGEST_NUMBER = 100  # characters; longer numbers are not read

# A sign counts only if it cannot be a minus between two numbers. Quantifiers that end in + are possessive: they do not
# backtrack, so "12" is never matched as "1".
_NUMBER = (
    r"(?:(?<![A-Za-z0-9_)\]}])(?P<sign>[-+−–]))?(?P<currency>[$€£]?)(?<![A-Za-z_])(?<![0-9])"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}+(?![0-9])|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z]))?(?:/(?P<divisor>[0-9]++)(?!\.[0-9]))?"
)
_ANY_NUMBER = re.compile(_NUMBER)
# "The answer is **57**", but not the 47 of "the answer is 47 + 10 = 57", which is read as its last number.
_ANSWER_IS = re.compile(
    r"(?i:\banswer)\W{0,4}(?:(?i:is)|:|=)[\s*_`$(\\:=]{0,10}" + _NUMBER + r"(?!\s*[-+−–*×/÷=^]\s*[0-9(])"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]{1,100})\}\{([0-9]{1,100})\}")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}")


def read_number(text: str) -> Fraction | None:
    """Read the number that a text states as its answer, exactly; None if there is none.

    Forms in order of precedence, each at its last occurrence: `\\boxed{5}`, `<answer>5</answer>`, `#### 5`,
    "answer is 5"; without any of these the last number of the text. Accepts thousands' commas, decimals, signs (the
    Unicode minus too), currency signs, fractions such as 3/4 or \\frac{3}{4}, and exponents such as 1.5e3. Does no
    algebra: in "2^5" it reads 5.
    """
    marked = [last_boxed(text), last_answer_tag(text), last_hashes(text)]
    for inner in marked:
        number = _last_number(inner) if inner is not None else None
        if number is not None:
            return number
    said = [match for match in map(_to_fraction, _ANSWER_IS.finditer(_plain(text))) if match is not None]
    return said[-1] if said else _last_number(text)


def _last_number(text: str) -> Fraction | None:
    last = None
    for last in _ANY_NUMBER.finditer(_plain(text)):  # noqa: B007 -- only the last one counts
        pass
    return None if last is None else _to_fraction(last)


def _plain(text: str) -> str:
    if "\\" not in text and "{" not in text:
        return text
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\!", "").replace("\\,", "")
    return _LATEX_FRACTION.sub(r" \1/\2 ", _LATEX_TEXT.sub(" ", text))


def _to_fraction(match: re.Match[str]) -> Fraction | None:
    digits, exponent, divisor = match["digits"].replace(",", ""), match["exponent"] or "", match["divisor"]
    if len(digits) > LONGEST_NUMBER:
        return None
    number = Fraction(int(digits)) if digits.isdecimal() and not exponent else Fraction(digits + exponent)
    if divisor is not None:
        if len(divisor) > LONGEST_NUMBER or not int(divisor):
            return None
        number /= int(divisor)
    return -number if match["sign"] in ("-", "−", "–") else number


def number_pairs(
    completions: Sequence[Any], answer_column: str, columns: dict[str, Any]
) -> list[tuple[Fraction | None, Fraction]]:
    """Pairs of the number in each completion and the right one.

    Raises:
        ValueError: if the column is missing or an answer has no number.
    """
    pairs = []
    known: dict[str, Fraction | None] = {}  # the completions of a group have the same right answer
    for completion, answer in zip(completions, map(str, column_of(columns, answer_column)), strict=True):
        if answer not in known:
            known[answer] = read_number(answer)
        right = known[answer]
        if right is None:
            raise ValueError(f"the {answer_column} {answer!r:.60} is not a number; use the exact reward for texts")
        pairs.append((read_number(completion_text(completion)), right))
    return pairs
