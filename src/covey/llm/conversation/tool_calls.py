"""Tool calls in the text of a turn, in the formats of the common chat templates.

| format | a call |
|---|---|
| hermes | `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM3 |
| smollm | `<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>`: SmolLM2, all calls in one list |
| qwen_xml | `<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5 |
| llama3 | `{"name": "add", "parameters": {"a": 1}}` as the whole turn, `<|python_tag|>` before it or not |
| mistral | `[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]`, or `[TOOL_CALLS]add[ARGS]{"a": 1}` for each call |
| fenced | a fenced code block with the language `tool`, which has a JSON object as in hermes; for all other templates |

The text must have the special tokens (`[TOOL_CALLS]` is one) and no end token. A call that cannot be read is an error,
which is a message for the model. This module imports the standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

DEFAULT_ID = "000000000"  # of a call without one; Mistral's templates accept only nine letters and digits
MOST_CALLS = 64  # in one turn; further ones are not read


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None  # if the format has one

    def message(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in a chat message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self._valid_id, "function": function}

    def reply(self, content: str) -> dict[str, Any]:
        """The chat message of the role tool with the result of this call."""
        return {"role": "tool", "name": self.name, "tool_call_id": self._valid_id, "content": content}

    @property
    def _valid_id(self) -> str:
        return self.id if self.id is not None and re.fullmatch("[A-Za-z0-9]{9}", self.id) else DEFAULT_ID


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the model: its text without the calls, the calls in their order, and a message for each bad call."""

    content: str
    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    unread: tuple[str, ...] = ()  # the text of each bad call

    def message(self) -> dict[str, Any]:
        """The turn as a chat message of the role assistant; `unread_calls` is covey's own key."""
        calls = {"tool_calls": [call.message() for call in self.calls]} if self.calls else {}
        unread = {"unread_calls": list(self.unread)} if self.unread else {}
        return {"role": "assistant", "content": self.content, **calls, **unread}


def find_format(template: str | None) -> str:
    """The format of the calls that a chat template shows to the model; `fenced` if it shows none that is known.

    A model whose format is `fenced` is told of its tools by `styles.with_tools`.
    """
    text = template or ""
    if "<tool_call>" in text:
        return "qwen_xml" if "<function=" in text else "hermes"
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<|start_header_id|>" in text and "ipython" in text and "parameters" in text:
        return "llama3"
    return "fenced"


def read_calls(text: str, format: str) -> ParsedTurn:
    """Read the calls in the text of a turn. Never raises, whatever the text.

    A call inside the model's thinking is not a call. The thinking is what stands before `</think>`, unless it is part
    of a call; its `<think>` may be in the prompt, which the template wrote. The end mark of the last call may be
    missing.
    """
    begin = 0
    if text.lstrip().startswith("<think>"):
        end = text.find(_THOUGHT_END)
        begin = end + len(_THOUGHT_END) if end >= 0 else len(text)
    reader = _read(text, begin, format)
    if not begin and (begin := reader.end_of_thinking()):
        reader = _read(text, begin, format)
    content = text[:begin] + "".join(reader.content)
    return ParsedTurn(content.strip(), tuple(reader.calls), tuple(reader.errors), tuple(reader.unread))


def given_calls(message: Mapping[str, Any]) -> list[ToolCall]:
    """The `tool_calls` of a chat message that somebody wrote, with arguments as an object or as its JSON text.

    Raises:
        ValueError: for an entry that is not a call.
    """
    return [_call_of(entry) for entry in message.get("tool_calls") or ()]


def write_calls(calls: Sequence[ToolCall], format: str) -> str:
    """The text of calls as a model with this format writes them, for examples."""
    form = _FORMATS[format]
    return form.turn.format(form.between.join(form.call.format(form.write(call)) for call in calls))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class RawText(str):
    """An argument of a format without types; a tool with another type than string gets it read as JSON."""

    __slots__ = ()


class _CannotRead(ValueError):
    """A call is wrong; the text says how, for the model."""


class _Reader:
    """Takes calls and text from a turn, from left to right."""

    def __init__(self, text: str, format: str) -> None:
        self.text, self.format, self.place = text, format, 0
        self.content: list[str] = []
        self.calls: list[ToolCall] = []
        self.errors: list[str] = []
        self.unread: list[str] = []
        self.spans: list[tuple[int, int]] = []  # of the text of calls and JSON values that were read

    def skip_to(self, mark: re.Pattern[str]) -> re.Match[str] | None:
        """Move behind the next mark; the text before it, or all that is left, is content."""
        found = mark.search(self.text, self.place) if len(self.calls) + len(self.errors) < MOST_CALLS else None
        self.content.append(self.text[self.place : found.start() if found else len(self.text)])
        self.place = found.end() if found else len(self.text)
        return found

    def take(self, mark: re.Pattern[str]) -> re.Match[str] | None:
        """The mark if it is next, after white space; moves behind it."""
        found = mark.match(self.text, _SPACE.match(self.text, self.place).end())  # type: ignore[union-attr]
        self.place = found.end() if found else self.place
        return found

    def take_json(self) -> Any:
        """The JSON value that is next; raises _CannotRead if there is none."""
        begin = _SPACE.match(self.text, self.place).end()  # type: ignore[union-attr]
        try:
            value, self.place = _DECODER.raw_decode(self.text, begin)
        except json.JSONDecodeError as error:
            raise _CannotRead(f"it is not valid JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise _CannotRead(f"it is not valid JSON: {str(error)[:100]}") from None
        self.spans.append((begin, self.place))
        return value

    def take_call(self, end: re.Pattern[str], read: Callable[[], Iterable[ToolCall]]) -> None:
        """Take calls up to the end mark, or an error; a call with an error is left out up to the mark."""
        begin = self.place
        try:
            calls = list(read())
            if not self.take(end) and not _SPACE_TO_END.match(self.text, self.place):
                raise _CannotRead("there is other text after it")
            self.calls += calls
            self.spans.append((begin, self.place))
        except _CannotRead as error:
            found = end.search(self.text, self.place)
            self.place = found.end() if found else len(self.text)
            self.unread.append(self.text[begin : found.start() if found else self.place])
            self.errors.append(
                f"Error: a tool call cannot be read: {error}. Write calls like this: {_EXAMPLES[self.format]}"
            )

    def end_of_thinking(self) -> int:
        """The place behind the first end of thinking that is not part of a call; 0 if there is none."""
        end = self.text.find(_THOUGHT_END)
        for first, after in self.spans:
            if first <= end < after:
                end = self.text.find(_THOUGHT_END, after)
        return end + len(_THOUGHT_END) if end >= 0 else 0

    def take_objects(self) -> list[ToolCall]:
        """A JSON object with a call, or a list of them."""
        value = self.take_json()
        return [_call_of(entry) for entry in (value if isinstance(value, list) else [value])]


_Take = Callable[[_Reader], Iterable[ToolCall]]


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE, _SPACE_TO_END = re.compile(r"\s*"), re.compile(r"\s*\Z")
_THOUGHT_END = "</think>"
_LLAMA_CALL = re.compile(r'\s*+(<\|python_tag\|>)?\s*+(?=\{\s*+"(?:name|type|function|parameters|arguments)"\s*:)')
_PYTHON_TAG, _SEMICOLON, _END = re.compile(r"<\|python_tag\|>"), re.compile(";"), re.compile(r"\Z")
_NAME = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\]([^\s\[\]{}]*))?\s*\[ARGS\]")
_FUNCTION, _END_FUNCTION = re.compile(r"<function=([^<>\n]+)>"), re.compile("</function>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(?:\n)?(.*?)(?:\n)?</parameter>", re.DOTALL)


def _read(text: str, begin: int, format: str) -> _Reader:
    reader = _Reader(text[begin:], format)
    _FORMATS[format].read(reader)
    return reader


def _call_of(value: Any) -> ToolCall:
    """The call of an object with name and arguments, as OpenAI's or in the function of one."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, dict):
        raise _CannotRead("it is not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise _CannotRead("it has no name of a tool")
    given = value.get("id")
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(name, _arguments(arguments), given if isinstance(given, str) else None)


def _arguments(value: Any) -> dict[str, Any]:
    if value is None:  # as some models write it for a tool without arguments
        return {}
    if isinstance(value, str):  # JSON in JSON, as OpenAI has it
        try:
            value = _DECODER.decode(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise _CannotRead("its arguments are not a JSON object")
    try:
        _json(value).encode()
    except UnicodeEncodeError:
        raise _CannotRead("it has half of a surrogate pair (\\ud800 to \\udfff), which is not text") from None
    except RecursionError:
        raise _CannotRead("its arguments are nested too deeply") from None
    return value


def _take_mistral(reader: _Reader) -> list[ToolCall]:
    named = reader.take(_NAME)
    return [ToolCall(named[1], _arguments(reader.take_json()), named[2] or None)] if named else reader.take_objects()


def _take_xml(reader: _Reader) -> list[ToolCall]:
    if not (named := reader.take(_FUNCTION)):
        raise _CannotRead("it has no <function=NAME>")
    arguments = {}
    while parameter := reader.take(_PARAMETER):
        arguments[parameter[1].strip()] = RawText(parameter[2])
    if not reader.take(_END_FUNCTION):
        raise _CannotRead("it has no </function> after its parameters")
    return [ToolCall(named[1].strip(), arguments)]


def _object(call: ToolCall, arguments: str = "arguments") -> str:
    return _json({"name": call.name, arguments: call.arguments})


def _xml(call: ToolCall) -> str:
    parameters = [
        f"<parameter={name}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        for name, value in call.arguments.items()
    ]
    return f"<function={call.name}>\n{''.join(parameters)}</function>"


@dataclass(frozen=True)
class _Format:
    """How calls are written in a turn, and read: all between two marks."""

    begin: re.Pattern[str] = re.compile("<tool_call>")
    end: re.Pattern[str] = re.compile("</tool_call>")
    take: _Take = _Reader.take_objects
    write: Callable[[ToolCall], str] = _object
    call: str = "<tool_call>\n{}\n</tool_call>"  # around each call
    between: str = "\n"
    turn: str = "{}"  # around all calls

    def read(self, reader: _Reader) -> None:
        while reader.skip_to(self.begin):
            reader.take_call(self.end, lambda: self.take(reader))


class _Llama(_Format):
    """Calls that are the whole turn."""

    def read(self, reader: _Reader) -> None:
        found = _LLAMA_CALL.match(reader.text)
        if not found:
            if reader.skip_to(_PYTHON_TAG):
                reader.take_call(_END, reader.take_objects)
            return
        reader.place = found.end()

        def objects() -> Iterable[ToolCall]:
            yield from reader.take_objects()
            while reader.take(_SEMICOLON):
                yield from reader.take_objects()

        reader.take_call(_END, objects)


_FORMATS = {
    "hermes": _Format(),
    "smollm": _Format(call="{}", between=", ", turn="<tool_call>[{}]</tool_call>"),
    "qwen_xml": _Format(take=_take_xml, write=_xml),
    "llama3": _Llama(write=partial(_object, arguments="parameters"), call="{}", between="; "),
    "mistral": _Format(
        re.compile(r"\[TOOL_CALLS\]"), re.compile(r"(?=\[TOOL_CALLS\])|\Z"), _take_mistral,
        lambda call: f"{call.name}[ARGS]{_json(call.arguments)}", "[TOOL_CALLS]{}", "",
    ),
    "fenced": _Format(
        re.compile(r"^ {0,3}```tool[ \t]*$\n?", re.MULTILINE), re.compile("```"), call="```tool\n{}\n```"
    ),
}  # fmt: skip
FORMATS = tuple(_FORMATS)
_EXAMPLES = {format: write_calls([ToolCall("NAME", {"ARGUMENT": "VALUE"})], format) for format in FORMATS}
