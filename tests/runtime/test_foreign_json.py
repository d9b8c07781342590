"""JSON of others: one line names the place and what is expected there."""

import random
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, Struct

from covey.runtime.foreign_json import BadJson, convert, read_json


class Inner(Struct):
    count: Annotated[int, Meta(ge=0)] = 0
    numbers: list[float] = []


class Outer(Struct):
    name: str
    inner: list[Inner] = []
    flag: bool = False


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "no JSON came"),
        (b"{", "no JSON came"),
        (b"\xff", "no JSON came"),
        (b'{"name": NaN}', "no JSON came"),
        (b'{"further": %s}' % (b"[" * 100_000 + b"]" * 100_000), "no JSON came"),
        (b"[]", "the JSON must be an object, not a list"),
        (b"{}", "the JSON has no name"),
        (b'{"name": null}', "name must be a text, not null"),
        (b'{"name": "", "flag": 1}', "flag must be true or false, not an integer"),
        (b'{"name": "", "inner": [{}, {"count": 1.0}]}', "inner[1].count must be an integer, not a number"),
        (b'{"name": "", "inner": [{"count": true}]}', "inner[0].count must be an integer, not true or false"),
        (b'{"name": "", "inner": [{"count": -1}]}', "inner[0].count must be an integer >= 0"),
        (b'{"name": "", "inner": [{"numbers": ["a"]}]}', "inner[0].numbers[0] must be a number, not a text"),
        (b'{"name": "", "inner": 3}', "inner must be a list, not an integer"),
    ],
)
def test_the_line_names_place_and_type(content: bytes, line: str) -> None:
    with pytest.raises(BadJson) as caught:
        read_json(content, msgspec.json.Decoder(Outer))
    assert str(caught.value) == line


def test_a_parsed_value_is_checked_in_the_same_way() -> None:
    assert convert({"name": "a", "further": object()}, Outer) == Outer("a")
    wrong: Any = {"name": "a", "inner": [{"count": "1"}]}
    with pytest.raises(BadJson, match=r"^inner\[0\]\.count must be an integer, not a text$"):
        convert(wrong, Outer)


def test_numbers_have_the_bits_that_were_written() -> None:
    numbers = [random.uniform(-30, 0) * 10 ** random.uniform(-300, 0) for _ in range(20_000)]
    content = msgspec.json.encode(Inner(numbers=numbers))
    assert read_json(content, msgspec.json.Decoder(Inner)).numbers == numbers
