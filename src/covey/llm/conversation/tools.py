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

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from covey.config import ConfigError
from covey.llm.conversation.environment import NO_TOOLS
from covey.llm.conversation.tool_calls import RawText, ToolCall
from covey.llm.conversation.tool_types import hint_schema, mismatch, read_as, shown_name, typed

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
