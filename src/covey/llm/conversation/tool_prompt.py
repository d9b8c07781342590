"""Tells a model of its tools: by its chat template, or by a system message if the template shows no tools.

Calls and replies that stand in given messages are written as those of a rollout are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from covey.config import ConfigError
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.tool_calls import ToolCall, find_format, given_calls, read_calls, write_calls
from covey.llm.conversation.tool_types import schema_of
from covey.llm.conversation.tools import Tool, ToolError, check_call
from covey.llm.model.chat import MARKER, Chat, Message

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of messages with the text of the thinking


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
    """The messages, as of `as_in_rollouts`, and the schemas with which to render a prompt whose model may call these
    tools.

    If the template shows no tools, the schemas are empty, and the first message describes the tools: the system
    message, with the chat's system prompt, or the first message of the user if the template has no role system.
    """
    schemas = [tool.schema for tool in tools]
    messages = as_in_rollouts(chat, messages, format)
    if not tools or (format != "fenced" and _shows(chat, messages, tools)):
        return messages, schemas
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


def as_in_rollouts(chat: Chat, messages: Sequence[Message], format: str) -> list[Message]:
    """The messages with the tool calls and the replies of tools as a rollout has them in a format.

    A call is written by the chat template, or in the content if the template does not write what `read_calls` reads as
    this call and this content.

    Raises:
        ConfigError: for a call that cannot be written so.
    """
    found: list[Message] = []
    waiting: list[ToolCall] = []  # calls without a reply
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            waiting, turn = _written_turn(chat, message, format)
            found.append(turn)
        elif message["role"] == "tool":
            unknown = ToolCall(str(message.get("name") or "tool"), {})
            answered = [call for call in waiting if call.id and call.id == message.get("tool_call_id")] or waiting
            call = answered[0] if answered else unknown
            waiting = [other for other in waiting if other is not call]
            found.append(reply_message(chat, call, message["content"]))
        else:
            found.append(message)
    return found


def _written_turn(chat: Chat, message: Message, format: str) -> tuple[list[ToolCall], Message]:
    """The calls of a turn, and the message whose text is read as these calls and the content."""
    try:
        calls = given_calls(message)
    except ValueError as error:
        raise ConfigError(f"an entry of 'tool_calls' is not a call of a tool: {error}") from None
    content = message.get("content") or ""
    by_template = {**message, "content": content, "tool_calls": [call.message() for call in calls]}
    by_covey = {"role": "assistant", "content": "\n".join(filter(None, [content, write_calls(calls, format)]))}
    for candidate in [by_covey] if format == "fenced" else [by_template, by_covey]:
        try:
            tokens = _encoder(chat).turn(candidate)
        except ConfigError:  # such as of a template that knows one call in a turn only
            continue
        read = read_calls(str(chat.tokenizer.decode(list(tokens[:-1]))), format)
        same = len(calls) == len(read.calls) and all(map(_is_same, calls, read.calls))
        if same and not read.errors and words(read.content) == words(_thought(message) + content):
            return calls, candidate
    names = ", ".join(call.name for call in calls)
    beside = " with the text beside it" if content.strip() else ""
    raise ConfigError(
        f"the call of {names}{beside} cannot be written in the model's format ({format}) so that it is read as the "
        "same call: change its arguments, leave out the text, or leave out the row"
    )


def words(text: str) -> str:
    """A text without white space and marks of thinking, which templates add and remove."""
    return re.sub(r"\s+|</?think>", "", text)


def _thought(message: Message) -> str:
    return "".join(str(message[key]) for key in THOUGHTS if message.get(key))


def _is_same(given: ToolCall, read: ToolCall) -> bool:
    """True if a call that was read is the given one; a format without types has the types of the given arguments."""
    kinds = {name: schema_of(value) for name, value in given.arguments.items()}
    tool = Tool(given.name, {"function": {"parameters": {"properties": kinds}}})
    try:
        return check_call([tool], read).arguments == given.arguments
    except ToolError:
        return False


@lru_cache(maxsize=8)
def _encoder(chat: Chat) -> ConversationEncoder:
    return ConversationEncoder(chat)


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


def _type_of(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    if "enum" in schema:
        return " or ".join(json.dumps(option, ensure_ascii=False) for option in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    if "properties" in schema:
        needed = schema.get("required") or ()
        fields = [(name if name in needed else f"{name}?", entry) for name, entry in schema["properties"].items()]
        return f"{{{', '.join(f'{name}: {_type_of(entry)}' for name, entry in fields)}}}"
    entries = [schema.get("items"), schema.get("additionalProperties"), *schema.get("prefixItems", ())]
    texts = [_type_of(entry) for entry in entries if entry]
    if any("{" in text for text in texts):  # others are short, because a small model reads them
        return f"{schema['type']} of {', '.join(texts)}"
    kind = schema.get("type") or "any"
    return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)
