"""Compares what a program returned or printed with what was expected. Only the parent calls this."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.sandbox.harness import DEEPEST, NotPlain, decode, encode

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-9  # of floating-point results


def matches(expected: Any, item: Any) -> bool:
    """True if an encoded result (`harness.encode`) is the expected value.

    Numbers are equal as in Python, and where a float is expected within a relative error of 1e-6; NaN equals only an
    expected NaN. A list equals a tuple with the same items, and an integer as a key its text, because JSON has neither
    tuples nor such keys. Texts, booleans and None need the same type.

    The result comes from an untrusted program, and it never becomes a dict or a set: hashing chosen integers takes a
    time that is quadratic in their number. Keys and the items of sets are compared by a text (`_text`).
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
        return tag in ("set", "frozenset") and len(parts) == len(expected) and _text(encode(expected)) == _text(item)
    return isinstance(expected, bytes) and tag == "bytes" and bool(decode(item) == expected)


def _same_number(expected: complex, item: Any, tag: Any) -> bool:
    if type(item) is not int and tag not in ("int", "float", "complex"):
        return False
    number = decode(item)
    if not isinstance(expected, float) or isinstance(number, complex):
        return bool(number == expected)
    if math.isnan(expected) or math.isnan(number):
        return math.isnan(expected) and math.isnan(number)
    return math.isclose(number, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def _same_dict(expected: dict[Any, Any], pairs: Sequence[Any]) -> bool:
    if len(pairs) != len(expected) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    wanted = {_text(encode(key)): value for key, value in expected.items()}
    found = {}
    for key, value in pairs:
        name = _text(key)
        found[name if name in wanted or type(key) is not int else _text(str(key))] = value
    return wanted.keys() == found.keys() and all(_matches(value, found[name]) for name, value in wanted.items())


def _text(item: Any, depth: int = 0) -> str:
    """A text that two encoded values share if, and only if, they are equal.

    Raises:
        NotPlain: for a value that can be neither a key nor in a set, or that `encode` does not write.
    """
    if depth > DEEPEST:
        raise NotPlain("nested too deeply")
    if isinstance(item, list) and item and item[0] in ("list", "tuple", "set", "frozenset"):
        parts = [_text(part, depth + 1) for part in item[1:]]
        is_set = item[0] in ("set", "frozenset")
        return f"{'set' if is_set else 'list'}({','.join(sorted(set(parts)) if is_set else parts)})"
    if isinstance(item, list) and (not item or item[0] not in ("int", "float", "complex", "bytes")):
        raise NotPlain("neither a key nor in a set")
    value = decode(item)
    if isinstance(value, complex):
        return _text(["float", value.real.hex()]) if not value.imag else f"{value.real.hex()}+{value.imag.hex()}j"
    if isinstance(value, float):
        return hex(int(value)) if value.is_integer() else value.hex()
    return hex(value) if type(value) is int else ascii(value)


def same_output(expected: str, printed: bytes) -> bool:
    """True if the lines are the same, apart from white space at the end of lines and empty lines at the end."""
    try:
        text = printed.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return _lines(text) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]
