"""Reads the number that a text states as its answer, exactly and in a time bounded by the length of the text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from covey.llm.rewards.answer_text import column_of, completion_text, last_answer_tag, last_boxed, last_hashes

LONGEST_NUMBER = 100  # characters; longer numbers are not read
LONGEST_EXPONENT = 2  # digits

# A sign counts only if it cannot be a minus between two numbers. Quantifiers that end in + are possessive: they do not
# backtrack, so "12" is never matched as "1".
_NUMBER = (
    r"(?:(?<![A-Za-z0-9_)\]}])(?P<sign>[-+−–]))?(?P<currency>[$€£]?)(?<![A-Za-z_])(?<![0-9])"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}+(?![0-9])|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)"
    r"(?P<exponent>[eE][-+−]?[0-9]++(?![A-Za-z]))?(?:/(?P<divisor>[0-9]++)(?!\.[0-9]))?"
)
_ANY_NUMBER = re.compile(_NUMBER)
# "The answer is **57**", but not the 47 of "the answer is 47 + 10 = 57", which is read as its last number.
_ANSWER_IS = re.compile(
    r"(?i:\banswer)\W{0,4}(?:(?i:is)|:|=)[\s*_`$(\\:=]{0,10}" + _NUMBER + r"(?!\s*[-+−–*×/÷=^]\s*[0-9(])"
)
_LATEX_FRACTION = re.compile(
    r"(?P<before>[\w)\]}]?)\\[dt]?frac\s?(?:\{\s?(?P<sign>[-−]?)\s?(?P<above>[0-9]{1,100})\s?\}|(?P<digit_above>[0-9]))"
    r"\s?(?:\{\s?(?P<below>[0-9]{1,100})\s?\}|(?P<digit_below>[0-9]))"
)
_MIXED = re.compile(r"(?<![0-9.,/])([0-9]{1,100}) {1,2}([0-9]{1,100})/([0-9]{1,100})(?![0-9./])")
_POWER_OF_TEN = re.compile(
    r"(?<=[0-9])\s?(?:×|\\times|\\cdot|[·*x])\s?10(?:\^|\*\*)\s?\{?\s?([-+−]?[0-9]{1,3})(?![0-9])\s?\}?"
)
_POWER = r"\s?\^\s?(?:\{[^{}]*\}|[-+−]?[0-9]++)"
_POWER_OF_A_UNIT = re.compile(rf"(?<=[A-Za-z]){_POWER}")
_LATEX_TEXT = re.compile(rf"\\(?:text|mathrm|mbox)\{{([^{{}}]*)\}}(?:{_POWER})?")
_POWER_OR_ROOT = re.compile(
    rf"(?<![0-9.,])[0-9.,]*+(?:(?<=[0-9])(?:{_POWER}|\*\*[-+]?[0-9]++)"
    rf"|\s?\\sqrt(?:\[[^\[\]]*\])?\s?(?:\{{[^{{}}]*\}}|[0-9]))|\([^()]*\){_POWER}"
)
_SIGNS = str.maketrans("‐‑﹣－＋", "----+")  # hyphens and full-width signs
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴-⁹]+")
_THIN_SPACE = re.compile("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")  # between thousands


def read_number(text: str) -> Fraction | None:
    """Read the number that a text states as its answer, exactly; None if there is none.

    Forms in order of precedence, each at its last occurrence: `\\boxed{5}`, `<answer>5</answer>`, `#### 5`,
    "answer is 5"; without any of these the last number of the text. Accepts thousands' commas and thin spaces,
    decimals, signs (the Unicode minus too), currency signs, fractions such as 3/4, \\frac{3}{4} and 2 1/2, exponents
    such as 1.5e3 and 1.5 \\times 10^3, and the digits of every script. Does no algebra: in "2^5" and "2\\sqrt{2}" there
    is no number. The power of a unit does not count: in "5 cm^2" it reads 5.
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
    """The text with its numbers as `_NUMBER` reads them, and without powers and roots."""
    if not text.isascii():
        text = _OTHER_DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text.translate(_SIGNS))
        text = _SUPERSCRIPT.sub(_with_caret, _THIN_SPACE.sub(",", text))
    if "\\" in text or "{" in text:
        text = text.replace("{,}", ",").replace("\\$", "$").replace("\\!", "").replace("\\,", "")
        without_words = _LATEX_TEXT.sub(" ", text)
        text = without_words if re.search("[0-9]", without_words) else _LATEX_TEXT.sub(r" \1 ", text)
        text = _LATEX_FRACTION.sub(_slashed, text)
    if "^" in text or "**" in text or "\\sqrt" in text:
        text = _POWER_OR_ROOT.sub(" x ", _POWER_OF_A_UNIT.sub("", _POWER_OF_TEN.sub(r"e\1 ", text)))
    return _MIXED.sub(_improper, text) if "/" in text else text


def _with_caret(match: re.Match[str]) -> str:
    return f"^{unicodedata.normalize('NFKC', match[0])} "


def _slashed(match: re.Match[str]) -> str:
    """A fraction of LaTeX as 3/4, apart from a letter or number before it."""
    above, below = match["above"] or match["digit_above"], match["below"] or match["digit_below"]
    return f"{match['before']}{match['before'] and ' '}{match['sign'] or ''}{above}/{below} "


def _improper(match: re.Match[str]) -> str:
    """A mixed number such as 2 1/2 as 5/2; another number before a fraction remains."""
    whole, above, below = map(int, match.groups())
    return f"{whole * below + above}/{below}" if above < below else match[0]


def _to_fraction(match: re.Match[str]) -> Fraction | None:
    digits, divisor = match["digits"].replace(",", ""), match["divisor"]
    exponent = (match["exponent"] or "").replace("−", "-")
    if len(digits) > LONGEST_NUMBER or len(exponent.lstrip("eE+-")) > LONGEST_EXPONENT:
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
