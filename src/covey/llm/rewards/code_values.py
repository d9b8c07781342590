"""Compares what a program returned or printed with what was expected. Only the parent calls this."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.sandbox.harness import NotPlain, decode

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-9  # of floating-point results


def matches(expected: Any, item: Any) -> bool:
    """True if an encoded result (`harness.encode`) is the expected value.

    Numbers are equal as in Python, floats within a relative error of 1e-6; NaN equals only an expected NaN. A list
    equals a tuple with the same items, and an integer as a key its text, because JSON has neither tuples nor such keys.
    Texts, booleans and None need the same type.

    The result comes from an untrusted program. It is compared piece by piece and never becomes a larger dict or set
    than the expected one, because one with chosen keys may take a time that is quadratic in its size.
    """
    try:
        return _matches(expected, item)
    except (NotPlain, OverflowError, RecursionError):
        return False


def _matches(expected: Any, item: Any) -> bool:
    if expected is None or isinstance(expected, (bool, str)):
        return type(item) is type(expected) and item == expected
    tag, parts = (item[0], item[1:]) if isinstance(item, list) and item else (None, [])
    if isinstance(expected, (int, float, complex)):
        return _same_number(expected, item, tag)
    if isinstance(expected, (list, tuple)):
        return tag in ("list", "tuple") and len(parts) == len(expected) and all(map(_matches, expected, parts))
    if isinstance(expected, dict):
        return tag == "dict" and _same_dict(expected, parts)
    if isinstance(expected, (set, frozenset)):
        return tag in ("set", "frozenset") and len(parts) == len(expected) and decode(item) == expected
    return isinstance(expected, bytes) and tag == "bytes" and bool(decode(item) == expected)


def _same_number(expected: complex, item: Any, tag: Any) -> bool:
    if type(item) is not int and tag not in ("int", "float", "complex"):
        return False
    number = decode(item)
    if isinstance(expected, int) and isinstance(number, int):
        return bool(number == expected)
    if isinstance(expected, complex) or isinstance(number, complex):
        return bool(number == expected)
    if math.isnan(expected) or math.isnan(number):
        return math.isnan(expected) and math.isnan(number)
    return math.isclose(number, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def _same_dict(expected: dict[Any, Any], pairs: Sequence[Any]) -> bool:
    if len(pairs) != len(expected):
        return False
    found = set()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            return False
        key = decode(pair[0])
        try:
            if type(key) is int and key not in expected:
                key = str(key)
            known = key in expected
        except TypeError:  # a key that cannot be one
            return False
        if not known or key in found or not _matches(expected[key], pair[1]):
            return False
        found.add(key)
    return True


def same_output(expected: str, printed: bytes) -> bool:
    """True if the lines are the same, apart from white space at the end of lines and empty lines at the end."""
    try:
        text = printed.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return _lines(text) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]
