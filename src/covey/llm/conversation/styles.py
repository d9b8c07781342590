"""Messages of a conversation with tools: tokens of a prompt, requests of a turn, replies to it.

The tools are shown by the chat template, or by a system message if the template shows none. Calls and replies in given
messages are written as those of a rollout are.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from covey.config import ConfigError
from covey.llm.conversation.encoding import PLAIN_TURN, QUESTION, ConversationEncoder, ReplyNotEncodable
from covey.llm.conversation.tool_calls import (
    FORMATS,
    CannotRead,
    Format,
    ParsedTurn,
    RawText,
    ToolCall,
    call_of,
    given_calls,
    marks_of,
)
from covey.llm.conversation.tools import ERROR, Tool, ToolError, check_call, schema_of
from covey.llm.model.chat import MARKER, Chat, Message
from covey.llm.model.chat_templates import TemplateFailed, parse_response

# The calls that a chat template writes, so that its format is seen.
TEXT, NUMBER = "coveytext", "coveynumber"
FIRST = ToolCall("coveytool", {TEXT: "coveyvalue", NUMBER: 7})
SECOND = ToolCall("coveytwo", {TEXT: "coveyvalue", NUMBER: 7})
_TOKEN = re.compile(r"<[^<>]*>?|\w+|\s+|.", re.DOTALL)


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
        self.chat, self.kind, self.tools = chat.for_tools if tools else chat, kind, tools
        self.format = call_format(self.chat, tools)
        self._reads_calls = kind == "tools" or bool(tools)
        of_calls = [str(reply_message(self.chat, ToolCall("t", {}), "")["role"])] if self._reads_calls else []
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
        parsed = self.format.read(str(self.chat.tokenizer.decode(list(tokens))))
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
        return Answer(_alternating(self.chat, replies), reply.get("reward", 0.0), done)

    def _request(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.kind == "tools":
            return {"do": "call", "calls": calls}
        return {"do": self.kind, "message": text, "calls": calls}


THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of messages with the text of the thinking


class DeclaredFormat:
    """Calls as a tokenizer declares them: transformers' response parsing, by the `response_template` of its config."""

    name = "declared by the tokenizer"

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._prefix = chat.render([QUESTION])

    def read(self, text: str) -> ParsedTurn:
        """As of `Format.read`."""
        try:
            message = parse_response(self._chat.tokenizer.response_template, self._prefix, text)
            calls = [call_of(_with_raw_texts(entry)) for entry in message.get("tool_calls") or ()]
        except (TemplateFailed, CannotRead) as error:
            reason = f"Error: a tool call cannot be read: {str(error)[:200]}. Write calls like this: {self.example}"
            return ParsedTurn("", (), (reason,), (text,))
        thought = "".join(f"<think>\n{message[key]}\n</think>\n\n" for key in THOUGHTS if message.get(key))
        numbered = tuple(call.numbered(number) for number, call in enumerate(calls))
        return ParsedTurn(f"{thought}{message.get('content') or ''}".strip(), numbered, ())

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as the chat template writes them.

        Raises:
            ConfigError: if it does not.
        """
        return _text_of_turn(self._chat, calls)

    @property
    def example(self) -> str:
        """A call, for messages."""
        return self.write([ToolCall("NAME", {"ARGUMENT": "VALUE"})])


class UnknownFormat:
    """Calls of a chat template which nothing here reads: every use raises ConfigError."""

    name = "unknown"

    def __init__(self, text: str) -> None:
        self._error = ConfigError(
            "the model's chat template writes calls of tools in a format that covey cannot read, "
            f"{text[:200]!r}: use another model, or a template with a format of docs/conversations.md"
        )

    def read(self, text: str) -> ParsedTurn:
        raise self._error

    def write(self, calls: Sequence[ToolCall]) -> str:
        raise self._error


CallFormat = Format | DeclaredFormat | UnknownFormat
# Of two calls a template may write the first only. The last ones find templates that write some values otherwise.
HARD = {"coveydeep": {"x": ["y", None]}, "coveytext": 'a\n"<b>" & ü'}
PROBES = ((FIRST,), (FIRST, SECOND), (replace(FIRST, arguments=HARD),), (replace(FIRST, arguments={}),))


def call_format(chat: Chat, tools: Sequence[Tool] = ()) -> CallFormat:
    """The format that reads the calls which the model's chat template writes.

    If the tokenizer declares it, that is the format. If the template writes no calls, it is the one whose marks the
    template has, else `fenced`.
    """
    try:
        template = chat.tokenizer.get_chat_template(tools=[tool.schema for tool in tools] or None)
    except ValueError:  # no template, or none with the name 'default'
        return FORMATS["fenced"]
    return _format_of(chat, template) if isinstance(template, str) else FORMATS["fenced"]


@lru_cache(maxsize=8)
def _format_of(chat: Chat, template: str) -> CallFormat:
    thinking, frame = marks_of(template)
    rows = [replace(each, thinking=thinking, frame=frame) for each in FORMATS.values()]
    if not chat.writes_calls(template):
        text = " ".join([template, *map(str, chat.tokenizer.added_tokens_decoder.values())])
        known = (each for each in rows if all(mark in text for mark in each.marks))
        found = max(known, key=lambda each: len(each.marks))
        return found if found.marks else rows[-1]
    unread, usual = "", chat.render([QUESTION, PLAIN_TURN, QUESTION])
    for id in ("", "functions.{name}:{number}"):
        texts = [_text_of_probe(chat, probe, id) for probe in PROBES]
        written = [
            ([call for call in probe if call.name in text], text)
            for probe, text in zip(PROBES, texts, strict=True)
            if text
        ]
        candidates: list[CallFormat] = list(rows)
        one, two = (re.sub(frame, "", rows[0].thought_end.split(text)[-1]) for text in texts[:2])
        if observed := observed_format(one, two, usual):
            candidates.append(replace(observed, thinking=thinking, frame=frame))
        if getattr(chat.tokenizer, "response_template", None):
            candidates.insert(0, DeclaredFormat(chat))
        for strict in (True, False):
            for format in candidates if written else ():
                if all(_reads(format, calls, text, strict=strict) for calls, text in written):
                    return format
        unread = unread or texts[0]
    return UnknownFormat(unread)


def _text_of_probe(chat: Chat, probe: Sequence[ToolCall], id: str) -> str:
    """The text of a turn with these calls, whose identifiers are as of `Format.id`; "" if the template refuses it."""
    calls = [replace(call, id=id.format(name=call.name, number=number) or None) for number, call in enumerate(probe)]
    try:
        return _text_of_turn(chat, calls)
    except ConfigError:  # such as of a template that knows one call in a turn only
        return ""


def _reads(format: CallFormat, calls: Sequence[ToolCall], text: str, *, strict: bool) -> bool:
    """True if a format reads these calls from a text; strictly, if it reads nothing else."""
    read = format.read(text)
    same = len(calls) == len(read.calls) > 0 and all(map(_is_same, calls, read.calls))
    return same and not read.errors and not (strict and words(read.content))


def _text_of_turn(chat: Chat, calls: Sequence[ToolCall]) -> str:
    """The text of a turn with calls as the chat template writes it, without its end token.

    Raises:
        ConfigError: if it cannot.
    """
    return _encoder(chat).own_text(
        {"role": "assistant", "content": "", "tool_calls": [each.message() for each in calls]}
    )


def _with_raw_texts(entry: Any) -> Any:
    """A call that transformers has read; its texts may be numbers, because some formats have no types."""
    if not isinstance(entry, dict) or not isinstance(entry.get("function"), dict):
        return entry
    function = entry["function"]
    given = function.get("arguments")
    if not isinstance(given, dict):
        return entry
    arguments = {key: RawText(value) if isinstance(value, str) else value for key, value in given.items()}
    return {**entry, "function": {**function, "arguments": arguments}}


def with_tools(
    chat: Chat, messages: Sequence[Message], tools: Sequence[Tool], format: CallFormat
) -> tuple[list[Message], list[dict[str, Any]]]:
    """The messages, as of `as_in_rollouts`, and the schemas with which to render a prompt whose model may call these
    tools.

    If the template shows no tools, the schemas are empty, and the first message describes the tools: the system
    message, with the chat's system prompt, or the first message of the user if the template has no role system.
    """
    schemas = [tool.schema for tool in tools]
    messages = as_in_rollouts(chat, messages, format)
    if not tools:
        return messages, schemas
    if isinstance(format, UnknownFormat):
        format.read("")  # raises
    if format.name != "fenced" and _shows(chat, messages, tools):
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


def as_in_rollouts(chat: Chat, messages: Sequence[Message], format: CallFormat) -> list[Message]:
    """The messages with the tool calls and the replies of tools as a rollout has them in a format.

    A call is written by the chat template, or in the content if the template does not write what the format reads as
    this call and this content.

    Raises:
        ConfigError: for a call that cannot be written so.
    """
    found: list[Message] = []
    waiting: list[tuple[Any, ToolCall]] = []  # calls without a reply, each with the identifier that was given
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls, turn = _written_turn(chat, message, format)
            waiting = list(zip([call.id for call in given_calls(message)], calls, strict=True))
            found.append(turn)
        elif message["role"] == "tool":
            unknown = (None, ToolCall(str(message.get("name") or "tool"), {}))
            answered = [each for each in waiting if each[0] and each[0] == message.get("tool_call_id")] or waiting
            one = answered[0] if answered else unknown
            waiting = [other for other in waiting if other is not one]
            found.append(reply_message(chat, one[1], message["content"]))
        else:
            found.append(message)
    return found


def _written_turn(chat: Chat, message: Message, format: CallFormat) -> tuple[list[ToolCall], Message]:
    """The calls of a turn, and the message whose text is read as these calls and the content."""
    try:
        calls = [call.numbered(number) for number, call in enumerate(given_calls(message))]
    except ValueError as error:
        raise ConfigError(f"an entry of 'tool_calls' is not a call of a tool: {error}") from None
    content = message.get("content") or ""
    by_template = {**message, "content": content, "tool_calls": [call.message() for call in calls]}
    by_covey = {"role": "assistant", "content": "\n".join(filter(None, [content, format.write(calls)]))}
    for candidate in [by_covey] if format.name == "fenced" else [by_template, by_covey]:
        try:
            tokens = _encoder(chat).turn(candidate)
        except ConfigError:  # such as of a template that knows one call in a turn only
            continue
        read = format.read(str(chat.tokenizer.decode(list(tokens[:-1]))))
        same = len(calls) == len(read.calls) and all(map(_is_same, calls, read.calls))
        if same and not read.errors and words(read.content) == words(_thought(message) + content):
            return list(read.calls), candidate
    names = ", ".join(call.name for call in calls)
    beside = " with the text beside it" if content.strip() else ""
    raise ConfigError(
        f"the call of {names}{beside} cannot be written in the model's format ({format.name}) so that it is read as "
        "the same call: change its arguments, leave out the text, or leave out the row"
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
    try:
        return MARKER in _encoder(chat).text_after_turn([ToolCall("t", {}).reply(MARKER)])
    except ConfigError:
        return False


def _alternating(chat: Chat, replies: Sequence[Any]) -> list[Any]:
    """The replies to a turn; messages of the user are joined if the template refuses two in a row, as Gemma's."""
    if _takes_two_of_the_user(chat):
        return list(replies)
    found: list[Any] = []
    for reply in replies:
        if found and reply["role"] == found[-1]["role"] == "user":
            found[-1] = {**reply, "content": f"{found[-1]['content']}\n\n{reply['content']}"}
        else:
            found.append(reply)
    return found


@lru_cache(maxsize=8)
def _takes_two_of_the_user(chat: Chat) -> bool:
    try:
        chat.render([QUESTION] * 2)
    except ConfigError:
        return False
    return True


def _shows(chat: Chat, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """True if the template writes the name of every tool into the prompt."""
    text = chat.render(messages, tools=[tool.schema for tool in tools])
    without = chat.render(messages)
    return all(text.count(tool.name) > without.count(tool.name) for tool in tools)


def description(tools: Sequence[Tool], format: CallFormat) -> str:
    """The tools and how to call one, as a text for a model. Short, because a small model reads it in every prompt."""
    lines = ["You can call these tools:"]
    for tool in tools:
        arguments = ", ".join(f"{name}: {_type_of(schema)}" for name, schema in tool.properties.items())
        about = " ".join(str(tool.schema["function"].get("description", "")).split())
        lines.append(f"- {tool.name}({arguments}): {about}")
        lines += [f"    {name}: {schema.get('description', '')}" for name, schema in tool.properties.items()]
    example = format.write([ToolCall(tools[0].name, dict.fromkeys(tools[0].properties, "..."))])
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
        self.style = Style(encoder.chat, "tools", tools)
        self.encoder = encoder if self.style.chat is encoder.chat else _encoder(self.style.chat)

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
            between: tuple[int, ...] = ()
            if end == begin + 1:
                raise ConfigError("a conversation has two messages of the role 'assistant' in a row: join them")
            if end is not None:
                try:
                    replies = _alternating(self.style.chat, written[begin + 1 : end])
                    between = self.encoder.after_turn(replies, ended=True)
                except ReplyNotEncodable as error:
                    raise ConfigError(f"a conversation cannot be encoded: the model's chat template {error}") from None
            if between and between[0] in self.style.chat.end_ids:  # the first token of a reply ends the turn
                turn, between = (*turn[:-1], between[0]), between[1:]
            actions += turn
            decided += [True] * len(turn)
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


@dataclass(frozen=True)
class _Body:
    """Where the arguments of a call stand in a text, or all of it."""

    kind: str  # a field of `Format.call`
    begin: int
    end: int
    options: dict[str, Any] = field(default_factory=dict)  # of the format


def observed_format(one: str, two: str, usual: str) -> Format | None:
    """The format of turns in which a template has written known calls.

    A turn with known calls is taken apart. Names, keys and values become fields; what is the same before, between and
    after two of them is the text of one:

        <tools><call add><a>1</a><b>2</b></call></tools>                                one call
        <tools><call add><a>1</a><b>2</b></call><call sub><a>1</a>...</call></tools>    two calls
        <tools>{}</tools>, <call {name}>{xml}</call>, <{key}>{value}</{key}>            turn, call, argument

    Args:
        one: the turn with FIRST.
        two: the turn with FIRST and SECOND; "": the template knows one call in a turn only.
        usual: a chat without calls; a mark of its own in a turn shows that the turn has more than calls.

    Returns:
        None if the calls are not found, or nothing marks their beginning.
    """
    body = _body(one, FIRST)
    if body is None:
        return None
    before, after = _with_fields(one[: body.begin], FIRST), one[body.end :]
    turn, between = "{}", "\n"
    other = _body(two, FIRST)
    rest = two[other.end :] if other else ""
    if following := _body(rest, SECOND):
        between = _with_fields(rest[: following.begin], SECOND)
        if body.kind not in ("objects", "python"):
            start, end = _repeated(before, between, after)
            if start.strip():
                turn = f"{before[: len(before) - len(start)]}{{}}{after[len(end) :]}"
                before, between, after = start, between[len(end) : len(between) - len(start)], end
    found = Format("of the template", f"{before}{{{body.kind}}}{after}", turn, between, **body.options)
    named = body.kind in ("object", "objects", "python") or "{name}" in before
    others = any(mark in usual for mark in re.findall(r"<[^<>{}]+>", found.call + found.turn))
    return found if named and not others and re.search(r"[<\[`]", found.first_mark.pattern) else None


def _with_fields(text: str, call: ToolCall) -> str:
    """The text before the arguments of a call, with fields in the place of its identifier and its name."""
    return text.replace(call.message()["id"], "{id}").replace(call.name, "{name}")


def _repeated(before: str, between: str, after: str) -> tuple[str, str]:
    """With what each of two parts begins and ends, by the texts before the first, between them and after the second."""
    end = _common(between, after)
    start = _common(before, between[len(end) :], -1)
    return start, end


def _common(first: str, second: str, step: int = 1) -> str:
    """The tokens with which both begin; from the end, if the step is -1."""
    tokens = [_TOKEN.findall(text)[::step] for text in (first, second)]
    same = [each for each, _ in takewhile(lambda both: both[0] == both[1], zip(*tokens, strict=False))]
    return "".join(same[::step])


def _body(text: str, call: ToolCall) -> _Body | None:
    found = (find(text, call) for find in (_json_body, _quoted_body, _python_body, _xml_body))
    return next(filter(None, found), None)


def _json_body(text: str, call: ToolCall) -> _Body | None:
    decoder = json.JSONDecoder()
    for found in re.finditer(r"[\[{]", text):
        try:
            value, end = decoder.raw_decode(text, found.start())
        except ValueError:
            continue
        entries = value if isinstance(value, list) else [value]
        if value == call.arguments:
            return _Body("json", found.start(), end)
        try:
            same = call_of(entries[0] if entries else None, keyed=True) == call
        except CannotRead:
            same = False
        if same:
            kind = "objects" if isinstance(value, list) else "object"
            return _Body(kind, found.start(), end, {"keys": _keys(entries[0], call)})
    return None


def _keys(entry: dict[str, Any], call: ToolCall) -> Sequence[str]:
    """The keys of the name, the arguments and the identifier of a call."""
    if call.name in entry:
        return ()
    name = next((key for key, value in entry.items() if value == call.name), "name")
    arguments = next((key for key, value in entry.items() if value == call.arguments), "arguments")
    return (name, arguments, *(key for key in entry if key.endswith("id")))


def _quoted_body(text: str, call: ToolCall) -> _Body | None:
    found = re.search(rf"\{{[^{{}}]*{TEXT}:(?P<quote>\S+?){call.arguments[TEXT]}(?P=quote)[^{{}}]*\}}", text)
    return _Body("quoted", found.start(), found.end(), {"quote": found["quote"]}) if found else None


def _python_body(text: str, call: ToolCall) -> _Body | None:
    found = re.search(rf"{call.name}\([^()]*{NUMBER}=[^()]*\)", text)
    return _Body("python", found.start(), found.end()) if found else None


def _xml_body(text: str, call: ToolCall) -> _Body | None:
    places: list[tuple[int, int, int, int]] = []  # begin and end of a key, and of its value
    for key in sorted((TEXT, NUMBER), key=text.find):
        value = str(call.arguments[key])
        begin = text.find(key, places[-1][-1] if places else 0)
        of_value = text.find(value, begin + len(key))
        if begin < 0 or of_value < 0:
            return None
        places.append((begin, begin + len(key), of_value, of_value + len(value)))
    first, second = places
    start, close = _repeated(text[: first[0]], text[first[3] : second[0]], text[second[3] :])
    middles = [re.findall(r"\w+|\W", text[key_end:value_begin]) for _, key_end, value_begin, _ in places]
    differ = [place for place, both in enumerate(zip(*middles, strict=False)) if both[0] != both[1]]
    if len(middles[0]) != len(middles[1]) or len(differ) > 1:
        return None
    kinds = ("", "")
    for place in differ:
        of_first, of_second = (each[place] for each in middles)
        kinds = (of_first, of_second) if text.find(TEXT) < text.find(NUMBER) else (of_second, of_first)
        middles[0][place] = "{kind}"
    argument = f"{start}{{key}}{''.join(middles[0])}{{value}}{close}"
    options = {"argument": argument, "kinds": kinds}
    return _Body("xml", first[0] - len(start), second[3] + len(close), options)
