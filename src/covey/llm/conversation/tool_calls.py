"""Tool calls in the text of a turn, in the formats of chat templates.

A format is the text of a call with fields, from which it is written and read. `call_format` of `styles.py` finds the
one that reads the calls which a chat template writes: a row of `FORMATS`, or what `observed_format` finds in them.

| field | text |
|---|---|
| {name}, {id} | the tool; the identifier of the call, as of `Format.id` |
| {object} | a JSON object with name and arguments, or a list of them; {objects} writes all calls as one list |
| {json} | the arguments as a JSON object |
| {xml} | the arguments one by one, each as `Format.argument` |
| {python} | all calls as in Python: `add(a=1, b="x")`, in brackets or in lines |
| {quoted} | the arguments as JSON whose keys are bare and whose strings are between `Format.quote` |

The text must have the special tokens (`[TOOL_CALLS]` is one) and no end token. A call that cannot be read is an error,
which is a message for the model. This module imports the standard library only.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

MOST_CALLS = 64  # in one turn; further ones are not read
MOST_ENDS = 16  # places at which calls in Python are tried to end: a string may have the text of the end mark
# Mistral's templates accept only nine letters and digits; Kimi's write the name in the identifier.
_VALID_ID = re.compile(r"[A-Za-z0-9]{9}|functions\.\S+:\d+")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    name: str
    arguments: dict[str, Any]
    id: str | None = field(default=None, compare=False)  # if the format has one

    def message(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in a chat message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self.numbered(0).id, "function": function}

    def reply(self, content: str) -> dict[str, Any]:
        """The chat message of the role tool with the result of this call."""
        return {"role": "tool", "name": self.name, "tool_call_id": self.numbered(0).id, "content": content}

    def numbered(self, number: int) -> ToolCall:
        """The call with an identifier that every template accepts: its own, or one for its place in a turn."""
        return self if self.id and _VALID_ID.fullmatch(self.id) else replace(self, id=f"{number:09}")


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


def given_calls(message: Mapping[str, Any]) -> list[ToolCall]:
    """The `tool_calls` of a chat message that somebody wrote, with arguments as an object or as its JSON text.

    Raises:
        ValueError: for an entry that is not a call.
    """
    return [call_of(entry) for entry in message.get("tool_calls") or ()]


class RawText(str):
    """An argument of a format without types; a tool with another type than string gets it read as JSON."""

    __slots__ = ()


class CannotRead(ValueError):
    """A call is wrong; the text says how, for the model."""


def call_of(value: Any, *, keyed: bool = False) -> ToolCall:
    """The call of an object with name and arguments, as OpenAI's or in the function of one.

    Args:
        keyed: the name is the only key, and the arguments are its value.

    Raises:
        CannotRead: if it is not one.
    """
    if keyed and isinstance(value, dict) and len(value) == 1 and "name" not in value:
        [(name, arguments)] = value.items()
        value = {"name": name, "arguments": arguments}
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, dict):
        raise CannotRead("it is not a JSON object")
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise CannotRead("it has no name of a tool")
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
        raise CannotRead("its arguments are not a JSON object")
    try:
        _json(value).encode()
    except UnicodeEncodeError:
        raise CannotRead("it has half of a surrogate pair (\\ud800 to \\udfff), which is not text") from None
    except RecursionError:
        raise CannotRead("its arguments are nested too deeply") from None
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE, _SPACE_TO_END = re.compile(r"\s*"), re.compile(r"\s*\Z")
_CDATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)
_FIELD = re.compile(r"\{(\w+)\}")
_BODIES = ("object", "objects", "json", "xml", "python", "quoted")
_MARK = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|[^<\s]+")  # a word of the template's own text
_FIRST_MARK = re.compile(r"\s*(?:<[^<>{]*>|\[[A-Z_]+\]|[^\n{]*)")
_TEXTS = {
    "name": r"""(?P<name>[^\s<>(){}\[\]"]+)""", "number": r"(?P<number>\d+)", "id": r"(?P<id>[^\s\[\]{}]*)",
    "key": r'(?P<key>[^<>\n"]+)', "value": "(?P<value>.*?)", "kind": r"\w*",
}  # fmt: skip


def _pattern(text: str) -> str:
    """The regular expression of a text with fields; white space is free."""
    pieces = _FIELD.split(text)
    texts = [
        r"\s*".join(["", *map(re.escape, piece.split()), ""]) if piece.strip() else r"\s*" for piece in pieces[::2]
    ]
    names = pieces[1::2]
    fields = [f"(?P={name})" if name in names[:place] else _TEXTS[name] for place, name in enumerate(names)]
    return "".join(text + name for text, name in zip(texts, [*fields, ""], strict=True))


class _Reader:
    """Takes calls and text from a turn, from left to right."""

    def __init__(self, text: str, format: Format) -> None:
        self.text, self.format, self.place = text, format, 0
        self.content: list[str] = []
        self.calls: list[ToolCall] = []
        self.errors: list[str] = []
        self.unread: list[str] = []
        self.spans: list[tuple[int, int]] = []  # of the text of calls and JSON values that were read

    def read_all(self) -> _Reader:
        while self._skip_to(self.format.first_mark):
            self._take_calls(self.format.end_mark)
        before = self.format.turn.partition("{}")[0].strip()
        if before and before in "".join(self.content) and not self.calls and not self.errors:
            self._refuse(f"it has no {self.format.call.partition('{')[0].strip()}", "".join(self.content))
        return self

    def end_of_thinking(self) -> int:
        """The place behind the first end of thinking that is not part of a call; 0 if there is none."""
        mark = self.format.thought_end
        found = mark.search(self.text)
        for first, after in self.spans:
            if found and first <= found.start() < after:
                found = mark.search(self.text, after)
        return found.end() if found else 0

    def _skip_to(self, mark: re.Pattern[str]) -> re.Match[str] | None:
        """Move behind the next mark; the text before it, or all that is left, is content."""
        found = mark.search(self.text, self.place) if len(self.calls) + len(self.errors) < MOST_CALLS else None
        self.content.append(self.text[self.place : found.start() if found else len(self.text)])
        self.place = found.end() if found else len(self.text)
        return found

    def _take(self, mark: re.Pattern[str]) -> re.Match[str] | None:
        """The mark if it is next, after white space; moves behind it."""
        found = mark.match(self.text, _SPACE.match(self.text, self.place).end())  # type: ignore[union-attr]
        self.place = found.end() if found else self.place
        return found

    def _take_calls(self, end: re.Pattern[str]) -> None:
        """Take calls up to the end mark, or an error; a call with an error is left out up to the mark."""
        begin = self.place
        try:
            calls = list(self._take_form())
            if not self._take(end):
                if not _SPACE_TO_END.match(self.text, self.place):
                    raise CannotRead("there is other text after it")
                if not self.format.ends_itself:
                    raise CannotRead(f"it has no {_MARK.findall(self.format.call)[-1]} at its end")
            self.calls += calls
            self.spans.append((begin, self.place))
        except CannotRead as error:
            found = end.search(self.text, self.place)
            self.place = found.end() if found else len(self.text)
            self._refuse(str(error), self.text[begin : found.start() if found else self.place])

    def _refuse(self, reason: str, text: str) -> None:
        self.unread.append(text)
        self.errors.append(f"Error: a tool call cannot be read: {reason}. Write calls like this: {self.format.example}")

    def _take_form(self) -> Iterable[ToolCall]:
        """The calls of the first form of a call whose text before the arguments fits."""
        for form in self.format.forms:
            if found := self._take(form.header):
                break
        else:
            raise CannotRead(f"it has no {self.format.forms[0].shown}")
        named = found.groupdict()
        match form.body:
            case "object" | "objects":
                yield from self._take_objects()
                while self._take(self.format.separator):
                    yield from self._take_objects()
            case "python":
                yield from self._take_python()
            case body:
                take = {"json": self._take_json, "xml": self._take_xml, "quoted": self._take_quoted}[body]
                id = self.format.id.format(**named) if self.format.id else named.get("id")
                yield ToolCall(named["name"], _arguments(take()), id or None)
        for mark in form.closing:
            if not self._take(re.compile(re.escape(mark))):
                raise CannotRead(f"it has no {mark} after its arguments")

    def _take_json(self) -> Any:
        """The JSON value that is next; raises CannotRead if there is none."""
        begin = _SPACE.match(self.text, self.place).end()  # type: ignore[union-attr]
        try:
            value, self.place = _DECODER.raw_decode(self.text, begin)
        except json.JSONDecodeError as error:
            raise CannotRead(f"it is not valid JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise CannotRead(f"it is not valid JSON: {str(error)[:100]}") from None
        self.spans.append((begin, self.place))
        return value

    def _take_objects(self) -> list[ToolCall]:
        """A JSON object with a call, or a list of them."""
        value, keyed = self._take_json(), not self.format.keys
        return [call_of(entry, keyed=keyed) for entry in (value if isinstance(value, list) else [value])]

    def _take_xml(self) -> dict[str, RawText]:
        arguments = {}
        while found := self._take(self.format.argument_pattern):
            literal = _CDATA.fullmatch(found["value"])
            arguments[found["key"].strip()] = RawText(literal[1] if literal else found["value"])
        return arguments

    def _take_quoted(self) -> Any:
        """JSON with bare keys and other marks of strings."""
        quote = re.escape(self.format.quote)
        text = re.compile(rf"(?:{quote}.*?{quote}|(?!{self.format.end_mark.pattern}).)*", re.DOTALL)
        found = text.match(self.text, self.place)
        assert found is not None  # it may be empty
        piece = re.compile(
            rf"""{quote}(?P<string>.*?){quote}|"(?:\\.|[^"\\])*"|(?P<word>[^\s{{}}\[\],:"][^\n{{}}\[\],:"]*)(?P<key>:)?""",
            re.DOTALL,
        )

        def as_json(piece: re.Match[str]) -> str:
            if piece["string"] is not None:
                return _json(piece["string"])
            if piece["word"] is None:
                return piece[0]
            word = piece["word"].rstrip()
            return f"{_json(word)}:" if piece["key"] else _CONSTANTS.get(word, word)

        try:
            value = _DECODER.decode(piece.sub(as_json, found[0]))
        except (ValueError, RecursionError):
            raise CannotRead("its arguments cannot be read") from None
        self.place = found.end()
        return value

    def _take_python(self) -> list[ToolCall]:
        """Calls of Python up to the end mark, or to the end of the text."""
        reason: CannotRead | None = None
        marks = re.compile(f"{self.format.thought_end.pattern}|{self.format.end_mark.pattern}", re.MULTILINE)
        ends = [found.start() for found in islice(marks.finditer(self.text, self.place), MOST_ENDS)]
        for end in [*ends, len(self.text)]:
            try:
                calls = _python_calls(self.text[self.place : end])
            except CannotRead as error:
                reason = reason or error
            else:
                self.spans.append((self.place, end))
                self.place = end
                return calls
        raise reason or CannotRead("it has no call")


_CONSTANTS = {"None": "null", "True": "true", "False": "false"}  # as templates write them
_PYTHON_NAMES = {"null": None, "true": True, "false": False}  # as JSON has them
_PYTHON_STRING = re.compile(r""" "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' """, re.DOTALL | re.VERBOSE)


def _python_calls(text: str) -> list[ToolCall]:
    """The calls of a text, by Python's parser; nothing is evaluated. Strings may have line ends."""
    values = _python_expressions(text)
    calls = [call for value in values for call in (value.elts if isinstance(value, ast.List) else [value])]
    if not calls:
        raise CannotRead("it is not a call as in Python")
    return [_python_call(call) for call in calls]


def python_value(text: str) -> Any:
    """The value of JSON's types that a text of Python has.

    Raises:
        CannotRead: if it has none.
    """
    values = _python_expressions(text)
    if len(values) != 1:
        raise CannotRead("it is not a value as in Python")
    return _python_value(values[0])


def _python_expressions(text: str) -> list[ast.expr]:
    try:
        with warnings.catch_warnings(action="ignore"):
            lines = ast.parse(_PYTHON_STRING.sub(lambda found: found[0].replace("\n", "\\n"), text.strip())).body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise CannotRead(f"it is not a call as in Python: {getattr(error, 'msg', 'it is nested too deeply')}") from None
    except ValueError as error:
        raise CannotRead(f"it is not a call as in Python: {str(error)[:100]}") from None
    if not all(isinstance(line, ast.Expr) for line in lines):
        raise CannotRead("it is not a call as in Python")
    return [line.value for line in lines if isinstance(line, ast.Expr)]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
        raise CannotRead("it is not a call as in Python")
    if node.args or not all(keyword.arg for keyword in node.keywords):
        raise CannotRead("its arguments have no names")
    return ToolCall(
        ast.unparse(node.func), _arguments({str(each.arg): _python_value(each.value) for each in node.keywords})
    )


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id="null" | "true" | "false" as name):
            return _PYTHON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_python_value(entry) for entry in entries]
        case ast.Dict(keys=keys, values=values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            return {key.value: _python_value(value) for key, value in zip(keys, values, strict=True)}  # type: ignore
    raise CannotRead("an argument is not a value of JSON's types")


THINK = ("<think>", "</think>")
# Marks around the thinking of models that have others, and a regular expression of marks around the text.
THINKING = (
    (("<|channel|>analysis<|message|>", "<|end|>"),
     r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>|<\|start\|>assistant|<\|end\|>"),
    (("<|START_THINKING|>", "<|END_THINKING|>"), r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"),
    (("<|channel>thought\n", "<channel|>"), r"(?!)"),
    (("<|inner_prefix|>", "<|inner_suffix|>"), r"(?!)"),
    (("<seed:think>", "</seed:think>"), r"(?!)"),
    (("[THINK]", "[/THINK]"), r"(?!)"),
)  # fmt: skip


def marks_of(template: object) -> tuple[tuple[str, str], str]:
    """The marks around the thinking that a chat template has, and the regular expression of marks around the text."""
    return next((each for each in THINKING if each[0][0].strip() in str(template)), (THINK, r"(?!)"))


def with_common_marks(text: str, thinking: tuple[str, str], frame: str) -> str:
    """The text with the marks of THINK around the thinking, and none around the rest; arguments as of `marks_of`."""
    if thinking == THINK:
        return text
    first, last = thinking
    thought = re.escape(first) + "(.*?)" + re.escape(last)
    text = re.sub(thought, lambda found: found[1].join(THINK), text, flags=re.DOTALL)
    return re.sub(frame, "", text).replace(first, THINK[0]).replace(last, THINK[1])


@dataclass(frozen=True)
class _Form:
    """A text of a call, divided for reading: before the arguments, what they are, the marks after them."""

    header: re.Pattern[str]
    shown: str  # the text before the arguments, for messages
    body: str
    closing: tuple[str, ...]  # without the last mark


@dataclass(frozen=True)
class Format:
    """How calls are written in a turn, and read."""

    name: str
    call: str  # with the fields of the table above
    turn: str = "{}"  # around all calls
    between: str = "\n"
    also: tuple[str, ...] = ()  # other texts of a call, which are read
    keys: tuple[str, ...] = ("name", "arguments")  # of {object}; (): the name is the key
    argument: str = ""  # of {xml}: with {key}, {value}, and {kind}
    kinds: tuple[str, str] = ("", "")  # the {kind} of a text, and of another value
    quote: str = ""  # of {quoted}
    id: str = ""  # of a call, with {name} and {number}; "": what the call has
    first: str = ""  # regular expression of the mark before a call, if it is not that of `call`
    thinking: tuple[str, str] = THINK  # marks around the thinking; those of THINK are read in every format
    frame: str = r"(?!)"  # marks around the text, which are left out

    def read(self, text: str) -> ParsedTurn:
        """Read the calls in the text of a turn. Never raises, whatever the text.

        A call inside the model's thinking is not a call. The thinking is what stands before its end mark, unless that
        is part of a call; its first mark may be in the prompt, which the template wrote. The end mark of the last call
        may be missing.
        """
        begin = 0
        for first, last in (self.thinking, THINK):
            if text.lstrip().startswith(first):
                end = text.find(last)
                begin = end + len(last) if end >= 0 else len(text)
                break
        reader = _Reader(text[begin:], self).read_all()
        if not begin and (begin := reader.end_of_thinking()):
            reader = _Reader(text[begin:], self).read_all()
        content = text[:begin] + "".join(reader.content)
        if reader.calls or reader.errors:
            for mark in filter(None, map(str.strip, self.turn.split("{}"))):
                content = content.replace(mark, "")
        content = with_common_marks(content, self.thinking, self.frame)
        calls = tuple(call.numbered(number) for number, call in enumerate(reader.calls))
        return ParsedTurn(content.strip(), calls, tuple(reader.errors), tuple(reader.unread))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The text of calls as a model with this format writes them, for examples."""
        fields = _FIELD.findall(self.call)
        if "objects" in fields:
            texts = [
                self.call.replace("{objects}", _json([self._object(call, place) for place, call in enumerate(calls)]))
            ]
        elif "python" in fields:
            texts = [self.call.replace("{python}", self.between.join(map(_python, calls)))]
        else:
            texts = [self._text(call, place) for place, call in enumerate(calls)]
        return self.turn.replace("{}", self.between.join(texts))

    def _text(self, call: ToolCall, number: int) -> str:
        id = self.id.format(name=call.name, number=number)
        values = {"name": call.name, "id": id or f"{number:09}", "number": str(number)}
        body = next(name for name in _FIELD.findall(self.call) if name in _BODIES)
        match body:
            case "object":
                values[body] = _json(self._object(call, number))
            case "json":
                values[body] = _json(call.arguments)
            case "xml":
                values[body] = "".join(self._argument(*both) for both in call.arguments.items())
            case "quoted":
                values[body] = _quoted(call.arguments, self.quote)
        return _FIELD.sub(lambda field: values[field[1]], self.call)

    def _object(self, call: ToolCall, number: int) -> dict[str, Any]:
        if not self.keys:
            return {call.name: call.arguments}
        return dict(zip(self.keys, (call.name, call.arguments, str(number)), strict=False))

    def _argument(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else _json(value)
        values = {"key": key, "value": text, "kind": self.kinds[not isinstance(value, str)]}
        return _FIELD.sub(lambda field: values[field[1]], self.argument)

    @cached_property
    def example(self) -> str:
        """A call, for messages."""
        return self.write([ToolCall("NAME", {"ARGUMENT": "VALUE"})])

    @cached_property
    def marks(self) -> frozenset[str]:
        """Words of the text of a call, by which a template that only describes it is known."""
        return frozenset(
            word for piece in _FIELD.split(self.call)[::2] for word in _MARK.findall(piece) if len(word) > 3
        )

    @cached_property
    def first_mark(self) -> re.Pattern[str]:
        words = _FIRST_MARK.match(self.call)[0].split()  # type: ignore[index]
        return re.compile(self.first or r"\s*".join(map(re.escape, words)), re.MULTILINE)

    @cached_property
    def end_mark(self) -> re.Pattern[str]:
        """The last mark of a call; what follows if it has none: the next call, or the end of the turn."""
        marks = _MARK.findall(_FIELD.split(self.call)[-1].lstrip("]"))  # of a list in Python, which is read with it
        whole = self.first.startswith(r"\A")
        nothing = r"(?:<\|python_end\|>)?\Z" if whole else rf"(?={self.first_mark.pattern})|\Z"
        return re.compile(re.escape(marks[-1]) if marks else nothing, re.MULTILINE)

    @cached_property
    def thought_end(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(last) for _, last in (self.thinking, THINK)))

    @cached_property
    def ends_itself(self) -> bool:
        """False if a call without its last mark may have lost arguments."""
        return "xml" not in _FIELD.findall(self.call) or bool(self.forms[0].closing)

    @cached_property
    def separator(self) -> re.Pattern[str]:
        """What may stand between several {object}."""
        mark = self.between.strip()
        return re.compile((f"{re.escape(mark)}|" if mark else "") + r"(?=\{)")

    @cached_property
    def forms(self) -> tuple[_Form, ...]:
        found = []
        for text in (self.call, *self.also):
            body = next(name for name in _FIELD.findall(text) if name in _BODIES)
            before, after = text.split(f"{{{body}}}")
            header = before.replace("{id}", self.id) if self.id else before
            header = header[_FIRST_MARK.match(header).end() :]  # type: ignore[union-attr]
            if body == "python":
                header, after = header.rstrip("["), after.lstrip("]")
            shown = header.strip().replace("{name}", "NAME").replace("{number}", "0")
            closing = tuple(_MARK.findall(after)[:-1])
            found.append(_Form(re.compile(_pattern(header)), shown, body, closing))
        return tuple(found)

    @cached_property
    def argument_pattern(self) -> re.Pattern[str]:
        before, _, after = self.argument.partition("{value}")
        line_ends = ["\n?" if there else "" for there in (before.endswith("\n"), after.startswith("\n"))]
        pattern = _pattern(before).removesuffix(r"\s*") + line_ends[0] + _TEXTS["value"] + line_ends[1]
        return re.compile(pattern + re.escape(after.strip()), re.DOTALL)


def _python(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={_json(value)}' for name, value in call.arguments.items())})"


def _quoted(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            pairs = (
                f"{key if _BARE.fullmatch(key) else quote + key + quote}:{_quoted(entry, quote)}"
                for key, entry in value.items()
            )
            return f"{{{','.join(pairs)}}}"
        case list():
            return f"[{','.join(_quoted(entry, quote) for entry in value)}]"
    return _json(value)


_BARE = re.compile(r"[\w.-]+")
_LLAMA_KEYS = r'\{\s*+"(?:name|type|function|parameters|arguments)"\s*:'
_HARMONY = " to=functions.{name}%s<|message|>{json}<|call|>"

# Forms without a mark of their own before a call, and those of which a model writes more than its chat template does.
# `observed_format` finds the others.
FORMATS = {
    format.name: format
    for format in (
        Format("hermes", "<tool_call>\n{object}\n</tool_call>"),
        Format("lfm2", "<|tool_call_start|>[{python}]<|tool_call_end|>", between=", "),
        Format(
            "deepseek3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        ),
        Format(
            "kimi", "<|tool_call_begin|>{id}<|tool_call_argument_begin|>{json}<|tool_call_end|>",
            "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", "", id="functions.{name}:{number}",
        ),
        Format("granite3", "<|tool_call|>{objects}"),
        Format("phi4", "<|tool_call|>{objects}<|/tool_call|>"),
        Format(
            "harmony", _HARMONY % "<|channel|>commentary json", between="<|start|>assistant",
            also=tuple(
                _HARMONY % between
                for between in (
                    "<|channel|>commentary <|constrain|>json", "<|constrain|>json", "<|channel|>commentary code",
                    "<|channel|>commentary", " json", " code", "",
                )
            ),
            first=r"(?:\A|<\|start\|>assistant)\s*(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\.",
        ),
        Format(
            "mistral", "[TOOL_CALLS]{name}[ARGS]{json}", between="",
            also=("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{json}", "[TOOL_CALLS]{objects}"),
        ),
        Format(
            "llama3", "{object}", between="; ", keys=("name", "parameters"),
            first=rf"\A\s*+(?:<\|python_(?:tag|start|end)\|>\s*+)*+(?={_LLAMA_KEYS})|<\|python_tag\|>",
        ),
        Format("json_list", "{objects}", first=rf"\A\s*+(?=\[\s*+{_LLAMA_KEYS})"),
        Format(
            "pythonic", "[{python}]", between=", ",
            first=r"\A\s*+(?:<\|python_start\|>)?\s*+(?=\[\s*+[A-Za-z_][\w.]*+\()",
        ),
        Format("fenced", "```tool\n{object}\n```", first=r"^ {0,3}```tool[ \t]*$\n?"),
    )
}  # fmt: skip
