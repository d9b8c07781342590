"""Tells a model of its tools: by its chat template, or by a system message if the template shows no tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from covey.config import ConfigError
from covey.llm.conversation.tool_calls import ToolCall, find_format, write_calls
from covey.llm.conversation.tools import Tool
from covey.llm.model.chat import Chat, Message

MARKER = "coveymarker"  # stands for a text, to see whether a template writes it


def call_format(chat: Chat, tools: Sequence[Tool] = ()) -> str:
    """The format in which the model writes calls, as of `find_format`; `fenced` if its template shows no tools."""
    try:
        template = chat.tokenizer.get_chat_template(tools=[tool.schema for tool in tools] or None)
    except ValueError:  # no template, or none with the name 'default'
        return "fenced"
    return find_format(template if isinstance(template, str) else None)


def with_tools(
    chat: Chat, messages: Sequence[Message], tools: Sequence[Tool], format: str
) -> tuple[list[Message], list[dict[str, Any]]]:
    """The messages and the schemas with which to render a prompt whose model may call these tools.

    If the template shows no tools, the schemas are empty, and the first message describes the tools: the system
    message, with the chat's system prompt, or the first message of the user if the template has no role system.
    """
    schemas = [tool.schema for tool in tools]
    if not tools or (format != "fenced" and _shows(chat, messages, tools)):
        return list(messages), schemas
    text = description(tools, format)
    first = messages[0] if messages else {"role": "user", "content": ""}
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]], []
    own = f"{chat.config.system_prompt}\n\n" if chat.config.system_prompt else ""
    with_system: list[Message] = [{"role": "system", "content": f"{own}{text}"}, *messages]
    try:
        if text.splitlines()[0] in chat.render(with_system):
            return with_system, []
    except ConfigError:
        pass
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]], []


def reply_message(chat: Chat, call: ToolCall, content: str) -> dict[str, Any]:
    """The result of a call as a message of the role tool, or of the role user if the template refuses or omits tool."""
    return call.reply(content) if _has_tool_role(chat) else {"role": "user", "content": content}


@lru_cache(maxsize=8)
def _has_tool_role(chat: Chat) -> bool:
    turn = {"role": "assistant", "content": "a"}
    try:
        return MARKER in chat.render([{"role": "user", "content": "u"}, turn, ToolCall("t", {}).reply(MARKER)])
    except ConfigError:
        return False


def _shows(chat: Chat, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """True if the template writes the name of every tool into the prompt."""
    text = chat.render(messages, tools=[tool.schema for tool in tools])
    without = chat.render(messages)
    return all(text.count(tool.name) > without.count(tool.name) for tool in tools)


def description(tools: Sequence[Tool], format: str) -> str:
    """The tools and how to call one, as a text for a model. Short, because a small model reads it in every prompt."""
    lines = ["You can call these tools:"]
    for tool in tools:
        arguments = ", ".join(f"{name}: {_type_of(schema)}" for name, schema in tool.properties.items())
        about = " ".join(str(tool.schema["function"].get("description", "")).split())
        lines.append(f"- {tool.name}({arguments}): {about}")
        lines += [f"    {name}: {schema.get('description', '')}" for name, schema in tool.properties.items()]
    example = write_calls([ToolCall(tools[0].name, dict.fromkeys(tools[0].properties, "..."))], format)
    return "\n".join([*lines, "To call one, write:", example, "The result is the next message."])


def _type_of(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(json.dumps(option, ensure_ascii=False) for option in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)
