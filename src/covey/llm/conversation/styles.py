"""Messages of a conversation with tools: tokens of a prompt, requests of a turn, replies to it.

The tools are shown by the chat template, or by a system message if the template shows none. Calls and replies in given
messages are written as those of a rollout are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from covey.config import ConfigError
from covey.llm.conversation.encoding import ConversationEncoder, ReplyNotEncodable
from covey.llm.conversation.tool_calls import ToolCall, find_format, given_calls, read_calls, write_calls
from covey.llm.conversation.tools import ERROR, Tool, ToolError, check_call, schema_of
from covey.llm.model.chat import MARKER, Chat, Message


@dataclass(frozen=True)
class Turn:
    """A turn of the model as it was read."""

    message: dict[str, Any]  # of the role assistant
    request: dict[str, Any] | None  # for the environment; None: it is not asked
    replies: tuple[dict[str, Any] | None, ...] = ()  # messages that follow; None: one that the environment writes
    calls: tuple[ToolCall, ...] = ()  # whose results the environment writes, in their order


@dataclass(frozen=True)
class Answer:
    """What follows a turn."""

    replies: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False  # the conversation is over


class Style:
    """Turns and replies of one kind of environments, as of `environment.style_of`.

    step      the text of every turn goes to the environment
    tools     the calls of a turn do; a turn without a call ends the conversation
    respond   the text does, and the calls that the tools allow, unless all of them are wrong
    """

    def __init__(self, chat: Chat, kind: str, tools: Sequence[Tool] = ()) -> None:
        self.chat, self.kind, self.tools = chat, kind, tools
        self.format = call_format(chat, tools)
        self._reads_calls = kind == "tools" or bool(tools)
        of_calls = [str(reply_message(chat, ToolCall("t", {}), "")["role"])] if self._reads_calls else []
        roles = of_calls if kind == "tools" else ["user", *of_calls]
        self.reply_roles = tuple(dict.fromkeys(roles))

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return self.chat.encode(*with_tools(self.chat, messages, self.tools, self.format))

    def read(self, tokens: Sequence[int]) -> Turn:
        """Read a turn, without its end token."""
        if not self._reads_calls:
            text = self.chat.decode(tokens)
            return Turn({"role": "assistant", "content": text}, self._request(text, []))
        parsed = read_calls(str(self.chat.tokenizer.decode(list(tokens))), self.format)
        replies: list[dict[str, Any] | None] = []
        checked: list[ToolCall] = []
        for call in parsed.calls:
            try:
                checked.append(check_call(self.tools, call))
                replies.append(None)
            except ToolError as error:
                replies.append(reply_message(self.chat, call, f"{ERROR}{error}"))
        replies += [reply_message(self.chat, ToolCall("error", {}), text) for text in parsed.errors]
        calls = [{"name": call.name, "arguments": call.arguments} for call in checked]
        asked = calls or (self.kind == "respond" and not replies)
        request = self._request(parsed.content, calls) if asked else None
        return Turn(parsed.message(), request, tuple(replies), tuple(checked))

    def take(self, turn: Turn, reply: Mapping[str, Any]) -> Answer:
        """Read the environment's reply to the request of a turn; {} if it was not asked."""
        results = zip(turn.calls, reply.get("texts", ()), strict=True)
        replies = [reply_message(self.chat, *next(results)) if known is None else known for known in turn.replies]
        text, done = reply.get("text"), reply.get("done", False)
        # The last reply is kept, although the model does not read it.
        if text or (text is not None and not done):
            replies.append({"role": "user", "content": text})
        return Answer(replies, reply.get("reward", 0.0), done)

    def _request(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.kind == "tools":
            return {"do": "call", "calls": calls}
        return {"do": self.kind, "message": text, "calls": calls}


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


class GivenTurns:
    """Encodes given conversations of a model that may call these tools.

    If there are no tools, calls are written in the model's format, and their names and arguments are not checked.
    """

    def __init__(self, encoder: ConversationEncoder, tools: Sequence[Tool] = ()) -> None:
        self.encoder, self.style = encoder, Style(encoder.chat, "tools", tools)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the messages before the first turn."""
        return self.style.encode(messages)

    def rest(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Token ids from the first turn to the end of the last one, and for each whether the model writes it.

        Args:
            messages: after the prompt; the first one is the assistant's.

        Raises:
            ConfigError: if a turn is not read as what is given, or the chat template cannot encode the messages.
        """
        written = as_in_rollouts(self.style.chat, messages, self.style.format)
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        actions: list[int] = []
        decided: list[bool] = []
        for begin, end in zip(turns, [*turns[1:], None], strict=True):
            turn = self._turn(messages[begin], written[begin])
            actions += turn
            decided += [True] * len(turn)
            if end is None:
                break
            if end == begin + 1:
                raise ConfigError("a conversation has two messages of the role 'assistant' in a row: join them")
            try:
                between = self.encoder.after_turn(written[begin + 1 : end], ended=True)
            except ReplyNotEncodable as error:
                raise ConfigError(f"a conversation cannot be encoded: the model's chat template {error}") from None
            actions += between
            decided += [False] * len(between)
        return tuple(actions), tuple(decided)

    def _turn(self, given: Message, written: Message) -> tuple[int, ...]:
        """The tokens of a turn, which a rollout would read as the given message."""
        tokens = self.encoder.turn(written)
        text = words(str(self.style.chat.tokenizer.decode(list(tokens))))
        for key in THOUGHTS:
            if words(str(given.get(key) or "")) not in text:
                raise ConfigError(
                    f"the model's chat template leaves out the {key!r} of a message: write it into the 'content'"
                )
        if given.get("unread_calls"):
            raise ConfigError("a message has 'unread_calls', which are not calls: leave out the row")
        replies = self.style.read(tokens[:-1]).replies if self.style.tools else ()
        for reply in replies:
            if reply is not None:
                raise ConfigError(f"a call of a tool is wrong: {reply['content'].removeprefix(ERROR)}")
        return tokens
