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

Only `describe_tools` imports transformers, so that the process of an environment starts quickly.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.config import ConfigError
from covey.llm.conversation.environment import NO_TOOLS
from covey.llm.conversation.tool_calls import RawText, ToolCall

ERROR = "Error: "  # begins every message about a mistake of the model


class ToolError(Exception):
    """A mistake of the model. An environment's tool may raise it; the model then gets its text as the reply."""


@dataclass(frozen=True)
class Tool:
    """A method of an environment with its JSON schema, as chat templates show it to the model."""

    name: str
    schema: dict[str, Any]  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}

    @property
    def properties(self) -> dict[str, Any]:
        """Name of an argument -> its schema."""
        properties: dict[str, Any] = self.schema["function"]["parameters"].get("properties", {})
        return properties


def describe_tools(environment: object) -> list[Tool]:
    """The tools of an environment or of its class, in the order of their definition.

    Every public method is a tool, except `reset`, `step` and `close`. It needs a type hint for every argument and a
    docstring with a section "Args:" that describes every argument. transformers' `get_json_schema` makes the schema.

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
            schema = get_json_schema(method)
            json.dumps(schema)
        except Exception as error:  # of a hint that cannot be resolved, too
            reason = " ".join(str(error).split())[:160].rstrip(".!")
            raise ConfigError(
                f"{where} cannot be described to a model ({reason}): give every argument a type hint and a line in the "
                'section "Args:" of the docstring, or begin the name with an underscore if it is no tool'
            ) from None
        schema["function"]["name"] = name
        tools.append(Tool(name, schema))
    return tools


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
        raise ToolError(f"there is no tool {_shown(call.name)}; the tools are: {names}")
    properties = tool.properties
    arguments = {}
    for name, value in call.arguments.items():
        if name not in properties:
            names = ", ".join(properties) or "none"
            raise ToolError(f"{tool.name} has no argument {_shown(name)}; its arguments are: {names}")
        arguments[name] = _converted(value, properties[name]) if isinstance(value, RawText) else value
        wrong = _mismatch(arguments[name], properties[name])
        if wrong:
            raise ToolError(f"the argument {_shown(name)} of {tool.name} {wrong}")
    missing = [name for name in tool.schema["function"]["parameters"].get("required", ()) if name not in arguments]
    if missing:
        raise ToolError(f"{tool.name} needs the argument {_shown(missing[0])}")
    return replace(call, arguments=arguments)


def run_tool(environment: object, call: ToolCall) -> str:
    """Call the method of a checked call; its result as text, or the message of a ToolError that it raises."""
    try:
        return text_of(getattr(environment, call.name)(**call.arguments))
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
        return run_tool(environment, check_call(describe_tools(environment) if tools is None else tools, call))
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


def _shown(name: str) -> str:
    """A name that the model made up, short and in one line."""
    return repr(name if len(name) <= 60 else name[:57] + "...")


_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # as templates write them
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "string": ("a string", (str,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", (bool,)),
    "array": ("a list", (list,)),
    "object": ("an object", (dict,)),
    "null": ("null", (type(None),)),
}


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind][1]) and (kind == "boolean" or not isinstance(value, bool))


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


def _mismatch(value: Any, schema: dict[str, Any]) -> str:
    """How a value differs from its schema, as the end of a sentence; empty if it does not.

    Knows the keys that `get_json_schema` writes, and the properties of objects; other keys allow any value.
    """
    if not isinstance(schema, dict):
        return ""
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        each = [_mismatch(value, option) for option in schema["anyOf"]]
        return "" if "" in each else " or ".join(dict.fromkeys(each))
    kinds = _kinds(schema)
    if kinds and not any(_is_of(value, kind) for kind in kinds):
        is_now = next(text for kind, (text, _) in _TYPES.items() if _is_of(value, kind))
        return f"must be {' or '.join(_TYPES[kind][0] for kind in kinds)}, and is {is_now}"
    if "enum" in schema and not any(type(value) is type(option) and value == option for option in schema["enum"]):
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
        parts = [(f"entry {_shown(key)}", entry, known.get(key, others)) for key, entry in value.items()]
    for where, entry, entry_schema in parts:
        if wrong := _mismatch(entry, entry_schema):
            return f"has an {where} that {wrong}"
    return ""


def _converted(text: RawText, schema: dict[str, Any]) -> Any:
    """A text of a format without types as the type of its schema, if it can be read so; otherwise the text."""
    if not _mismatch(str(text), schema):
        return str(text)
    plain = text.strip()
    try:
        return _PYTHON_CONSTANTS[plain] if plain in _PYTHON_CONSTANTS else json.loads(plain)
    except (ValueError, RecursionError):
        return str(text)
