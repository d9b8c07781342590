"""JSON of others, checked by types (msgspec): servers, clients, files."""

import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

NAMES = {
    "`int`": "an integer",
    "`float`": "a number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`object`": "an object",
    "`array`": "a list",
    "`null`": "null",
}


class BadJson(ValueError):
    """JSON that is not of its type; the message is one line with the place and what is expected there."""


def read_json(content: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The value of a decoder's type in JSON from outside.

    Raises:
        BadJson: if it is none.
    """
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        raise BadJson(_explained(str(error))) from None
    except (ValueError, RecursionError):
        raise BadJson("no JSON came") from None


def convert(value: Any, kind: type[T]) -> T:
    """A parsed value as this type.

    Raises:
        BadJson: if it is not of the type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadJson(_explained(str(error))) from None


def _explained(message: str) -> str:
    """msgspec's message as a line that begins with the place."""
    what, _, path = message.partition(" - at `$")
    place = path.rstrip("`").removeprefix(".") or "the JSON"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"{place} has no {missing[1]}"
    for theirs, ours in NAMES.items():
        what = what.replace(theirs, ours)
    if what.startswith("Expected "):
        return f"{place} must be {what.removeprefix('Expected ').replace(', got', ', not')}"
    return f"{place}: {what}"
