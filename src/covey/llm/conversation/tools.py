"""Tools: the public methods of an environment, which a model calls.

>>> class Dice:
...     def roll(self, sides: int) -> int:
...         '''Roll a die.
...
...         Args:
...             sides: number of sides
...         '''
...         return sides
>>> [tool.name for tool in describe_tools(Dice())]
['roll']
>>> call_tool(Dice(), ToolCall("roll", {"sides": 6}))
'6'
>>> call_tool(Dice(), ToolCall("roll", {"sides": "six"}))
"Error: the argument 'sides' of roll must be an integer, and is a string"

Types of arguments:

| type hint | the model writes | the method gets |
|---|---|---|
| `int`, `float`, `str`, `bool`, `None`, `Any`, `Literal` | the value | the value |
| `list`, `tuple` | a list | a list, a tuple |
| `dict` | an object with any keys | a dict |
| a union | a value of one of the types | the value for the first type that it fits |
| `Enum` | the value of a member | the member |
| a dataclass or a TypedDict | an object with its fields | an object of the class |

Only `describe_tools` imports transformers, so that the process of an environment starts quickly.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import EnumType
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from covey.config import ConfigError
from covey.llm.conversation.environment import NO_TOOLS
from covey.llm.conversation.tool_calls import CannotRead, RawText, ToolCall, python_value

ERROR = "Error: "  # begins every message about a mistake of the model


class ToolError(Exception):
    """A mistake of the model. An environment's tool may raise it; the model then gets its text as the reply."""


@dataclass(frozen=True)
class Tool:
    """A method of an environment with its JSON schema, as chat templates show it to the model."""

    name: str
    schema: dict[str, Any]  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}
    hints: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # of its arguments

    @property
    def properties(self) -> dict[str, Any]:
        """Name of an argument -> its schema."""
        properties: dict[str, Any] = self.schema["function"]["parameters"].get("properties", {})
        return properties


def describe_tools(environment: object) -> list[Tool]:
    """The tools of an environment or of its class, in the order of their definition.

    Every public method is a tool, except `reset`, `step` and `close`. It needs a type hint for every argument and a
    docstring with a section "Args:" that describes every argument, which transformers' `get_json_schema` reads.

    Raises:
        ConfigError: if a method cannot be described; one line with its name.
    """
    from transformers.utils import get_json_schema

    kind = environment if isinstance(environment, type) else type(environment)
    tools = []
    for name, method in _public_methods(kind).items():
        where = f"the tool {kind.__name__}.{name}"
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            raise ConfigError(f"{where} is an async function or a generator: make it an ordinary method")
        parameters = list(inspect.signature(method).parameters.values())
        if any(
            parameter.kind is not parameter.POSITIONAL_OR_KEYWORD
            for parameter in parameters[1:]
            if parameter.kind is not parameter.KEYWORD_ONLY
        ):
            raise ConfigError(f"{where} takes *args, **kwargs or positional-only arguments: name every argument")
        try:
            hints = get_type_hints(method)
            schema = get_json_schema(_with_any_arguments(method, hints))
            properties = schema["function"]["parameters"]["properties"]
            for argument in properties:
                properties[argument] = hint_schema(hints[argument]) | properties[argument]
            json.dumps(schema)
        except Exception as error:  # of a hint that cannot be resolved, too
            reason = " ".join(str(error).split()).rstrip(".!")
            raise ConfigError(
                f"{where} cannot be described to a model ({reason}): give every argument a type hint and a line in the "
                'section "Args:" of the docstring, or begin the name with an underscore if it is not a tool'
            ) from None
        schema["function"]["name"] = name
        tools.append(Tool(name, schema, hints))
    return tools


def _with_any_arguments(method: Any, hints: Mapping[str, Any]) -> Any:
    """A function with the signature and the docstring of a method, whose arguments have any type."""

    @functools.wraps(method)
    def described() -> None: ...

    described.__annotations__ = {name: hint if name == "return" else Any for name, hint in hints.items()}
    described.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return described


def _public_methods(kind: type) -> dict[str, Any]:
    """Name -> function, those of base classes first."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name in vars(base):
            method = getattr(kind, name, None)
            if (
                not name.startswith("_")
                and name not in NO_TOOLS
                and (inspect.isfunction(method) or inspect.ismethod(method))
            ):
                found[name] = inspect.getattr_static(kind, name)
    return {name: getattr(method, "__func__", method) for name, method in found.items()}


def check_call(tools: Sequence[Tool], call: ToolCall) -> ToolCall:
    """The call, if there is such a tool and its arguments have the types of the schema.

    Raises:
        ToolError: otherwise, with a message for the model.
    """
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        names = ", ".join(tool.name for tool in tools) or "none"
        raise ToolError(f"there is no tool {shown_name(call.name)}; the tools are: {names}")
    properties = tool.properties
    arguments = {}
    for name, value in call.arguments.items():
        if name not in properties:
            names = ", ".join(properties) or "none"
            raise ToolError(f"{tool.name} has no argument {shown_name(name)}; its arguments are: {names}")
        arguments[name] = read_as(value, properties[name]) if isinstance(value, RawText) else value
        wrong = mismatch(arguments[name], properties[name])
        if wrong:
            raise ToolError(f"the argument {shown_name(name)} of {tool.name} {wrong}")
    missing = [name for name in tool.schema["function"]["parameters"].get("required", ()) if name not in arguments]
    if missing:
        raise ToolError(f"{tool.name} needs the argument {shown_name(missing[0])}")
    return replace(call, arguments=arguments)


def run_tool(environment: object, call: ToolCall, tools: Sequence[Tool] | None = None) -> str:
    """Call the method of a checked call; its result as text, or the message of a ToolError that it raises.

    Args:
        tools: of the environment, if they are known; otherwise the type hints of the method are resolved again.
    """
    method = getattr(environment, call.name)
    hints = next((tool.hints for tool in tools or () if tool.name == call.name), None) or get_type_hints(method)
    try:
        return text_of(method(**{name: typed(value, hints[name]) for name, value in call.arguments.items()}))
    except ToolError as error:
        return f"{ERROR}{error}"


def call_tool(environment: object, call: ToolCall, tools: Sequence[Tool] | None = None) -> str:
    """Check and run a call of the model.

    A mistake of the model is answered with a message that begins with "Error: ". Any other exception that the method
    raises is raised here.

    Args:
        tools: of the environment, if they are known; otherwise they are described again.
    """
    try:
        tools = describe_tools(environment) if tools is None else tools
        return run_tool(environment, check_call(tools, call), tools)
    except ToolError as error:
        return f"{ERROR}{error}"


def text_of(result: Any) -> str:
    """The result of a tool as text: a string unchanged, plain data as JSON, anything else by `str`."""
    if isinstance(result, str):
        return str(result)
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def shown_name(name: str) -> str:
    """A name that the model made up, short and in one line."""
    return repr(name if len(name) <= 60 else name[:57] + "...")


_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "string": ("a string", (str,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", (bool,)),
    "array": ("a list", (list,)),
    "object": ("an object", (dict,)),
    "null": ("null", (NoneType,)),
}
_KINDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    NoneType: "null",
}


def hint_schema(hint: Any, inside: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The JSON schema of a type hint, as transformers' `get_json_schema` writes it if it knows the type.

    Args:
        hint: as of `typing.get_type_hints`.
        inside: the classes of whose fields it is one.

    Raises:
        TypeError: for a type that a model cannot write.
    """
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal or isinstance(hint, EnumType):
        values = list(arguments) or [member.value for member in hint]
        kinds = list(dict.fromkeys(_KINDS.get(type(value), "") for value in values))
        if not values or not {*kinds} <= {"string", "integer", "number", "boolean", "null"}:
            raise TypeError(f"{hint} has a value that is not a text, a number, a boolean or None")
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
    if origin in (Union, UnionType):
        options = [hint_schema(option, inside) for option in arguments if option is not NoneType]
        schema: dict[str, Any] = options[0] if len(options) == 1 else {"anyOf": options}
        if len(options) > 1 and all(option.keys() == {"type"} and type(option["type"]) is str for option in options):
            names = sorted({option["type"] for option in options})
            schema = {"type": names if len(names) > 1 else names[0]}
        return {**schema, "nullable": True} if NoneType in arguments else schema
    if (fields := _fields(hint)) is not None:
        if hint in inside:
            raise TypeError(f"the class {hint.__name__} contains itself")
        properties = {name: hint_schema(field, (*inside, hint)) for name, (field, _) in fields.items()}
        required = [name for name, (_, needed) in fields.items() if needed]
        schema = {"type": "object", "properties": properties, "required": required}
        return {**schema, "additionalProperties": False}
    if origin not in _KINDS:
        raise TypeError(
            f"{getattr(hint, '__qualname__', hint)} is not a type that a model can write, which are int, float, str, "
            "bool, list, tuple, dict, Any, Literal, Enum, unions, dataclasses and TypedDict"
        )
    schema = {"type": _KINDS[origin]}
    if (origin is list and arguments) or arguments[1:] == (...,):
        schema["items"] = hint_schema(arguments[0], inside)
    elif origin is tuple and arguments:
        schema["prefixItems"] = [hint_schema(entry, inside) for entry in arguments]
    elif origin is dict and arguments:
        schema["additionalProperties"] = hint_schema(arguments[1], inside)
    return schema


def _fields(hint: Any) -> dict[str, tuple[Any, bool]] | None:
    """Name -> type hint and whether it is required, of a dataclass or a TypedDict; None for another type."""
    if not isinstance(hint, type):
        return None
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return {
            name: (
                of.type if isinstance(of := hints[name], dataclasses.InitVar) else of,
                given.default is given.empty,
            )
            for name, given in inspect.signature(hint).parameters.items()
        }
    if not issubclass(hint, dict) or not hasattr(hint, "__required_keys__"):
        return None
    hints, marked = get_type_hints(hint), get_type_hints(hint, include_extras=True)
    marks = {name: get_origin(mark) for name, mark in marked.items()}  # __required_keys__ misses those in quotes
    required = {name for name in hint.__required_keys__ if marks[name] is not NotRequired}
    required |= {name for name, mark in marks.items() if mark is Required}
    return {name: (of, name in required) for name, of in hints.items()}


def typed(value: Any, hint: Any) -> Any:
    """A value that fits the schema of a type hint, as an object of its type. A number is as the model wrote it."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        option = next((option for option in arguments if not mismatch(value, hint_schema(option))), Any)
        return typed(value, option)
    if (fields := _fields(hint)) is not None:
        return hint(**{name: typed(entry, fields[name][0]) for name, entry in value.items()})
    if isinstance(hint, EnumType):
        return next(member for member in list[Any](hint) if _is_equal(member.value, value))
    if isinstance(value, list) and arguments:
        entries = [arguments[0]] * len(value) if origin is list or arguments[1:] == (...,) else arguments
        value = [typed(entry, of) for entry, of in zip(value, entries, strict=True)]
    if isinstance(value, dict) and arguments:
        return {key: typed(entry, arguments[1]) for key, entry in value.items()}
    return tuple(value) if origin is tuple else value


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind][1]) and (kind == "boolean" or not isinstance(value, bool))


def _is_equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def schema_of(value: Any) -> dict[str, Any]:
    """The JSON schema with the type of a value."""
    return {"type": next(kind for kind in _TYPES if _is_of(value, kind))}


def _kinds(schema: dict[str, Any]) -> list[str]:
    """The types that a schema allows; empty for any. A type that JSON schemas do not have allows any value."""
    given = schema.get("type") or []
    kinds = given if isinstance(given, list) else [given]
    if not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        return []
    return [*kinds, "null"] if kinds and schema.get("nullable") else kinds


def mismatch(value: Any, schema: dict[str, Any]) -> str:
    """How a value differs from its schema, as the end of a sentence; empty if it does not.

    Knows the keys that `hint_schema` writes; other keys allow any value.
    """
    if not isinstance(schema, dict):
        return ""
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        each = [mismatch(value, option) for option in schema["anyOf"]]
        return "" if "" in each else " or ".join(dict.fromkeys(each))
    kinds = _kinds(schema)
    if kinds and not any(_is_of(value, kind) for kind in kinds):
        is_now = next(text for kind, (text, _) in _TYPES.items() if _is_of(value, kind))
        return f"must be {' or '.join(_TYPES[kind][0] for kind in kinds)}, and is {is_now}"
    if "enum" in schema and not any(_is_equal(value, option) for option in schema["enum"]):
        return f"must be one of {', '.join(json.dumps(option, ensure_ascii=False) for option in schema['enum'])}"
    parts: list[tuple[str, Any, dict[str, Any]]] = []  # place of an entry, the entry, its schema
    if isinstance(value, list):
        fixed = schema.get("prefixItems")
        if fixed is not None and len(value) != len(fixed):
            return f"must have {len(fixed)} entries, and has {len(value)}"
        schemas = fixed if fixed is not None else [schema.get("items", {})] * len(value)
        parts = [(f"entry {place + 1}", *both) for place, both in enumerate(zip(value, schemas, strict=True))]
    elif isinstance(value, dict):
        known, others = schema.get("properties") or {}, schema.get("additionalProperties", {})
        for key in schema.get("required") or ():
            if key not in value:
                return f"lacks the entry {shown_name(key)}"
        unknown = [key for key in value if key not in known]
        if unknown and others is False:
            return f"has the unknown entry {shown_name(unknown[0])}; its entries are: {', '.join(known) or 'none'}"
        parts = [(f"entry {shown_name(key)}", entry, known.get(key, others)) for key, entry in value.items()]
    for where, entry, entry_schema in parts:
        if wrong := mismatch(entry, entry_schema):
            return f"has an {where} that {wrong}"
    return ""


def read_as(text: RawText, schema: dict[str, Any]) -> Any:
    """A text of a format without types as the type of its schema, if it can be read so; otherwise the text."""
    if not mismatch(str(text), schema):
        return str(text)
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):
        pass
    try:
        return python_value(text)  # as some templates write an object, or None
    except CannotRead:
        return str(text)
