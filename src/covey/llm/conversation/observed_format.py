"""The format of tool calls as it is seen in turns that a chat template writes.

A turn with known calls is taken apart. Names, keys and values become fields; what is the same before, between and after
two of them is the text of one:

    <tools><call add><a>1</a><b>2</b></call></tools>                                one call
    <tools><call add><a>1</a><b>2</b></call><call sub><a>1</a>...</call></tools>    two calls
    <tools>{}</tools>, <call {name}>{xml}</call>, <{key}>{value}</{key}>            turn, call, argument
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from covey.llm.conversation.tool_calls import CannotRead, Format, ToolCall, call_of

TEXT, NUMBER = "coveytext", "coveynumber"
FIRST = ToolCall("coveytool", {TEXT: "coveyvalue", NUMBER: 7})
SECOND = ToolCall("coveytwo", {TEXT: "coveyvalue", NUMBER: 7})
_TOKEN = re.compile(r"<[^<>]*>?|\w+|\s+|.", re.DOTALL)


@dataclass(frozen=True)
class _Body:
    """Where the arguments of a call stand in a text, or all of it."""

    kind: str  # a field of `Format.call`
    begin: int
    end: int
    options: dict[str, Any] = field(default_factory=dict)  # of the format


def observed_format(one: str, two: str, usual: str) -> Format | None:
    """The format of turns in which a template has written known calls.

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
