"""Tools: schemas of an environment's methods, and calls with checked arguments."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any, Literal, NotRequired, TypedDict

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers.utils import get_json_schema

from covey.config import ConfigError
from covey.llm.conversation.environment import HostedEnvironment
from covey.llm.conversation.processes import copied_environment
from covey.llm.conversation.styles import call_format, with_tools
from covey.llm.conversation.tool_calls import FORMATS, RawText, ToolCall
from covey.llm.conversation.tools import Tool, ToolError, call_tool, check_call, describe_tools, text_of
from helpers.chat_models import CHAT_MODELS, chat_of
from helpers.tool_templates import formats


class Base:
    def first(self) -> None:
        """Do nothing."""


class Speed(Enum):
    SLOW = 1
    FAST = "fast"


class Size(TypedDict):
    width: int
    unit: NotRequired[Literal["cm", "m"]]


@dataclass
class Place:
    town: str
    street: str | None = None
    type: str = "house"  # a name that type hints have as well


@dataclass(frozen=True)
class Parcel:
    """What is sent."""

    to: Place
    sizes: list[Size] = field(default_factory=list)
    weight: InitVar[float] = 1.0
    price: float = field(init=False, repr=False)

    def __post_init__(self, weight: float) -> None:
        if weight > 9:
            raise ToolError("the parcel is too heavy")
        object.__setattr__(self, "price", 2 * weight)


class Shop(Base):
    """An environment with tools of all kinds."""

    rate = 1.5

    @property
    def owner(self) -> str:
        raise AssertionError("a property is not a tool")

    def reset(self, **columns: Any) -> None:
        self.sold: list[str] = []

    def sell(self, item: str, count: int = 1, price: float | None = None) -> str:
        """Sell an item.

        Args:
            item: name of the item
            count: number of items
            price: of each
        """
        return f"{count} {item} at {price}"

    def paint(
        self, color: Literal["red", "blue"], parts: list[int], labels: dict[str, str], size: tuple[int, str]
    ) -> Any:
        """Paint parts.

        Args:
            color: the color
            parts: numbers of the parts
            labels: of the parts
            size: number and unit
        """
        return [color, parts, labels, size]

    @staticmethod
    def ring(loud: bool) -> bool:
        """Ring the bell.

        Args:
            loud: or not
        """
        return loud

    def either(self, value: list[int] | int) -> Any:
        """Take a number or several.

        Args:
            value: the numbers
        """
        return value

    def send(self, parcel: Parcel, speed: Speed = Speed.SLOW, by: Place | Size | str | None = None) -> Any:
        """Send a parcel.

        Args:
            parcel: the parcel
            speed: of the delivery
            by: where it goes along
        """
        return f"{parcel} {parcel.price} {speed} {by!r}"

    def fail(self, kind: str) -> str:
        """Fail.

        Args:
            kind: of the failure
        """
        if kind == "model":
            raise ToolError("the shop is closed")
        raise KeyError(kind)

    def _hidden(self, x):
        pass


SHOP = Shop()
TOOLS = describe_tools(SHOP)


def called(name: str, **arguments: Any) -> str:
    return call_tool(SHOP, ToolCall(name, arguments), TOOLS)


def test_public_methods_are_tools_in_the_order_of_their_definition() -> None:
    assert [tool.name for tool in TOOLS] == ["first", "sell", "paint", "ring", "either", "send", "fail"]
    assert describe_tools(Shop) == TOOLS
    assert TOOLS[1].schema == {
        "type": "function",
        "function": {
            "name": "sell",
            "description": "Sell an item.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "name of the item"},
                    "count": {"type": "integer", "description": "number of items"},
                    "price": {"type": "number", "nullable": True, "description": "of each"},
                },
                "required": ["item"],
            },
            "return": {"type": "string"},
        },
    }


PLACE = {
    "type": "object",
    "properties": {
        "town": {"type": "string"},
        "street": {"type": "string", "nullable": True},
        "type": {"type": "string"},
    },
    "required": ["town"],
    "additionalProperties": False,
}
SIZE = {
    "type": "object",
    "properties": {"width": {"type": "integer"}, "unit": {"type": "string", "enum": ["cm", "m"]}},
    "required": ["width"],
    "additionalProperties": False,
}


def test_classes_with_fields_are_objects() -> None:
    assert TOOLS[5].properties == {
        "parcel": {
            "type": "object",
            "properties": {
                "to": PLACE,
                "sizes": {"type": "array", "items": SIZE},
                "weight": {"type": "number"},
            },
            "required": ["to"],
            "additionalProperties": False,
            "description": "the parcel",
        },
        "speed": {"type": ["integer", "string"], "enum": [1, "fast"], "description": "of the delivery"},
        "by": {"anyOf": [PLACE, SIZE, {"type": "string"}], "nullable": True, "description": "where it goes along"},
    }


@pytest.mark.parametrize("name", [tool.name for tool in TOOLS if tool.name != "send"])
def test_schemas_are_those_of_transformers(name: str) -> None:
    [tool] = [tool for tool in TOOLS if tool.name == name]
    if name == "either" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("transformers before 5.18 joins the types of a list and of a number")
    assert tool.schema == get_json_schema(getattr(Shop, name))


def test_an_environment_without_methods_has_no_tools() -> None:
    class Game:
        def reset(self) -> None: ...

        def step(self, message): ...

        def close(self) -> None: ...

    assert describe_tools(Game()) == []


def taking(hint: Any, docstring: str | None = "Take x.\n\n    Args:\n        x: a value\n    ") -> Any:
    """A method with an argument x of this type; None: without a type."""

    def method(self, x):
        return 0

    method.__doc__, method.__annotations__ = docstring, {"return": int} | ({} if hint is None else {"x": hint})
    return method


@dataclass
class Node:
    next: Node | None = None


def many(self, *numbers: int) -> int:
    """Take numbers.

    Args:
        numbers: all
    """
    return 0


async def later(self, x: int) -> int:
    """Take x.

    Args:
        x: a number
    """
    return x


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (taking(int, None), "it has no docstring"), (taking(None), "Argument x is missing a type hint"),
        (taking(int, "Take x."), "no description for the argument 'x'"),
        (taking("Nowhere"), "name 'Nowhere' is not defined"),
        (taking(asyncio.Queue), r"\(Queue is not a type that a model can write, which are int, .* and TypedDict\)"),
        (taking(list[Node]), r"\(the class Node contains itself\)"), (many, "name every argument"),
        (later, "make it an ordinary method"),
    ],
)  # fmt: skip
def test_a_method_that_cannot_be_described_is_named(method: Any, reason: str) -> None:
    kind = type("Mine", (), {"method": method})
    with pytest.raises(ConfigError, match=rf"^the tool Mine\.method .*{reason}") as caught:
        describe_tools(kind())
    assert "\n" not in str(caught.value)


def test_calls() -> None:
    assert called("sell", item="tea", count=2, price=1) == "2 tea at 1"
    assert called("sell", item="tea", price=None) == "1 tea at None"
    assert (
        called("paint", color="red", parts=[1], labels={"a": "ü"}, size=[2, "m"])
        == '["red", [1], {"a": "ü"}, [2, "m"]]'
    )
    assert called("ring", loud=True) == "true"
    assert called("first") == "null"
    assert called("either", value=[1, 2]) == "[1, 2]"
    assert called("either", value=3) == "3"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (
            {"parcel": {"to": {"town": "Ulm"}, "weight": 2}, "speed": "fast"},
            "Parcel(to=Place(town='Ulm', street=None, type='house'), sizes=[]) 4 Speed.FAST None",
        ),
        (
            {"parcel": {"to": {"town": "a", "street": "b"}, "sizes": [{"width": 1}]}, "by": {"town": "c"}},
            "Parcel(to=Place(town='a', street='b', type='house'), sizes=[{'width': 1}]) 2.0 Speed.SLOW "
            "Place(town='c', street=None, type='house')",
        ),
        (
            {"parcel": RawText('{"to": {"town": "a"}}'), "speed": RawText("1"), "by": RawText("me")},
            "Parcel(to=Place(town='a', street=None, type='house'), sizes=[]) 2.0 Speed.SLOW 'me'",
        ),
    ],
)
def test_a_method_gets_objects_of_its_types(arguments: dict[str, Any], given: str) -> None:
    assert called("send", **arguments) == given
    assert call_tool(SHOP, ToolCall("send", arguments)) == given, "described again"


def test_a_class_with_fields_is_known_in_the_process_of_a_copied_environment() -> None:
    """Whose type hints are in quotes, as in this file, and whose names the copy does not have."""
    make, tools = pickle.loads(copied_environment(Shop, "Shop"))
    hosted = HostedEnvironment(make, 1000, tools)
    call = {"name": "send", "arguments": {"parcel": {"to": {"town": "Ulm"}}}}
    [text] = hosted.answer({"do": "call", "calls": [call]})["texts"]
    assert text.startswith("Parcel(to=Place(town='Ulm'")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("buy", {}, "there is no tool 'buy'; the tools are: first, sell, paint, ring, either, send, fail"),
        ("_hidden", {"x": 1}, "there is no tool '_hidden'"),
        ("reset", {}, "there is no tool 'reset'"),
        ("x" * 500, {}, f"there is no tool '{'x' * 57}...'"),
        ("sell", {}, "sell needs the argument 'item'"),
        ("sell", {"item": "tea", "amount": 2}, "sell has no argument 'amount'; its arguments are: item, count, price"),
        ("first", {"a": 1}, "first has no argument 'a'; its arguments are: none"),
        ("sell", {"item": 5}, "the argument 'item' of sell must be a string, and is an integer"),
        ("sell", {"item": "a", "count": 2.5}, "the argument 'count' of sell must be an integer, and is a number"),
        ("sell", {"item": "a", "count": True}, "the argument 'count' of sell must be an integer, and is true or false"),
        ("sell", {"item": "a", "count": "2"}, "the argument 'count' of sell must be an integer, and is a string"),
        ("sell", {"item": "a", "count": None}, "the argument 'count' of sell must be an integer, and is null"),
        ("sell", {"item": "a", "price": "1"}, "the argument 'price' of sell must be a number or null, and is a string"),
        ("ring", {"loud": 1}, "the argument 'loud' of ring must be true or false, and is an integer"),
        ("either", {"value": "x"}, "the argument 'value' of either must be a list, and is a string or must be an int"),
        ("paint", {"color": "green"}, "the argument 'color' of paint must be one of \"red\", \"blue\""),
        ("paint", {"parts": [1, "b"]}, "the argument 'parts' of paint has an entry 2 that must be an integer"),
        ("paint", {"labels": {"a": 1}}, "the argument 'labels' of paint has an entry 'a' that must be a string"),
        ("paint", {"size": [1]}, "the argument 'size' of paint must have 2 entries, and has 1"),
        ("send", {"parcel": {}}, "the argument 'parcel' of send lacks the entry 'to'"),
        ("send", {"parcel": "Ulm"}, "the argument 'parcel' of send must be an object, and is a string"),
        ("send", {"parcel": {"to": {"town": 1}}}, "the argument 'parcel' of send has an entry 'to' that has an entry "
         "'town' that must be a string, and is an integer"),
        ("send", {"parcel": {"to": {"town": "a"}, "price": 1}}, "the argument 'parcel' of send has the unknown entry "
         "'price'; its entries are: to, sizes, weight"),
        ("send", {"parcel": {"to": {"town": "a"}, "weight": 10}}, "the parcel is too heavy"),
        ("send", {"speed": "SLOW"}, "the argument 'speed' of send must be one of 1, \"fast\""),
        ("send", {"by": {"width": "a"}}, "the argument 'by' of send lacks the entry 'town' or has an entry 'width'"),
        ("fail", {"kind": "model"}, "the shop is closed"),
    ],
)  # fmt: skip
def test_a_mistake_of_the_model_is_answered(name: str, arguments: dict[str, Any], message: str) -> None:
    assert called(name, **arguments).startswith(f"Error: {message}")


def test_a_failure_of_the_tool_is_raised() -> None:
    with pytest.raises(KeyError):
        called("fail", kind="tool")


@pytest.mark.parametrize(
    ("parameter", "written", "value"),
    [("count", "3", 3), ("price", "1.5", 1.5), ("price", "None", None), ("item", "3", "3"), ("item", "True", "True")],
)
def test_arguments_of_a_format_without_types_are_read_by_the_schema(parameter: str, written: str, value: Any) -> None:
    text = f"<tool_call>\n<function=sell>\n<parameter={parameter}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    [call] = formats()["qwen_xml"].read(text).calls
    arguments = check_call(TOOLS, ToolCall("sell", {"item": "a"} | call.arguments)).arguments
    assert arguments[parameter] == value
    assert type(arguments[parameter]) is type(value)
    if parameter == "count":
        with pytest.raises(ToolError, match="must be an integer, and is a string"):
            check_call(TOOLS, ToolCall("sell", {"item": "a", "count": RawText("three")}))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(
    st.sampled_from([*(tool.name for tool in TOOLS[:-1]), "no"]),
    st.dictionaries(
        st.sampled_from(
            ["item", "count", "price", "color", "parts", "labels", "size", "loud", "value", "parcel", "by"]
        ),
        values,
    ),
)
@settings(max_examples=100)
def test_no_arguments_of_a_model_raise(name: str, arguments: dict[str, Any]) -> None:
    assert isinstance(called(name, **arguments), str)


def test_results_of_every_type_become_text() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert text_of("a\nb") == "a\nb"
    assert text_of({"a": [1, 2.5, None]}) == '{"a": [1, 2.5, null]}'
    assert text_of(loop) == "[[...]]"
    assert text_of({1}) == "{1}"
    assert text_of(b"x") == "b'x'"


# ---- the prompt ----


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_every_model_reads_of_its_tools_exactly_once(name: str) -> None:
    chat = chat_of(name)
    tools = [Tool(tool.name, tool.schema) for tool in TOOLS]
    format = call_format(chat, tools)
    prompt, schemas = with_tools(chat, [{"role": "user", "content": "Hello"}], tools, format)
    text = chat.render(prompt, tools=schemas)
    assert bool(schemas) == (format.name != "fenced")
    assert text.count("Sell an item.") == 1
    assert text.count("Hello") == 1
    if format.name == "fenced":
        assert "```tool\n" in text
        assert "- sell(item: string, count: integer, price: number): Sell an item." in text
        place = "{town: string, street?: string, type?: string}"
        size = '{width: integer, unit?: "cm" or "m"}'
        parcel = f"{{to: {place}, sizes?: array of {size}, weight?: number}}"
        assert f'- send(parcel: {parcel}, speed: 1 or "fast", by: {place} or {size} or string): Send' in text


def test_a_system_message_stays_before_the_description_of_the_tools() -> None:
    system = {"role": "system", "content": "Be brief."}
    prompt, _ = with_tools(chat_of("smollm"), [system, {"role": "user", "content": "Hello"}], TOOLS, FORMATS["fenced"])
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert prompt[0]["content"].startswith("Be brief.\n\nYou can call these tools:\n- first(): Do nothing.")


def test_without_tools_the_prompt_is_unchanged() -> None:
    assert with_tools(chat_of("smollm"), [{"role": "user", "content": "Hello"}], [], FORMATS["fenced"]) == (
        [{"role": "user", "content": "Hello"}],
        [],
    )
