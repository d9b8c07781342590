"""Tool calls are read as chat templates write them; a text that is not a call, or a broken one, never raises."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covey.llm.conversation.tool_calls import FORMATS, MOST_CALLS, THINKING, ParsedTurn, ToolCall
from covey.llm.model.chat_templates import render
from helpers.tool_templates import FORMATS as FORMAT_OF
from helpers.tool_templates import NAMES, SPECIAL, TEMPLATES, formats

USER = {"role": "user", "content": "u"}
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "```tool\n", "```", "<|python_tag|>",
    "<function=add>", "</function>", "<parameter=a>", "</parameter>", "<think>", "\n</think>", "[", "]", "{", "}", ";",
    "<arg_key>", "</arg_value>", "<|tool_call>call:add", '<|"|>', "<tool_call|>", "<function_calls>", "(", ")", "=",
    ",", "<|tool_call_start|>[", " to=functions.add<|message|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "[THINK]",
    '{"name": "add", "arguments": {"a": 1}}', '"name"', ":", "1", " ", "\n", "add", "NaN", "\\", '"', "'", "ü",
    "\ud800",
)  # fmt: skip
# Formats whose arguments are JSON, which any text can be in.
OTHERS = (
    "qwen_xml", "glm", "hy3", "seed", "minimax", "deepseek_xml", "cdata", "gemma4", "functiongemma", "olmo3", "lfm2",
    "pythonic",
)  # fmt: skip
JSON = [name for name in NAMES if name not in OTHERS]
WHOLE = ("llama3", "json_list", "pythonic")  # calls are the whole turn
text = st.text(max_size=8) | st.lists(st.sampled_from(MARKS[:-1]), max_size=3).map("".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["add", "run_python", "f2"])
calls = st.lists(st.builds(ToolCall, names, st.dictionaries(text, values, max_size=3)), min_size=1, max_size=3)
plain_calls = st.lists(
    st.builds(
        ToolCall, names, st.dictionaries(st.sampled_from("abc"), st.text("a1 <>{}\"'\\é", max_size=9).map(str.strip))
    ),
    min_size=1,
    max_size=3,
)


def read_calls(text: str, format: str) -> ParsedTurn:
    return formats()[format].read(text)


def write_calls(calls: list[ToolCall], format: str) -> str:
    return formats()[format].write(calls)


def rendered(name: str, turn: ParsedTurn) -> str:
    """The turn as the template writes it, without its end token."""
    begin = render(TEMPLATES[name], [USER], SPECIAL)
    whole = render(TEMPLATES[name], [USER, turn.message()], SPECIAL, answer_begins=False)
    common = begin if whole.startswith(begin) else begin.rstrip("\n")
    assert whole.startswith(common)
    written = whole[len(common) :]
    for end in ("<|im_end|>\n", "<|eot_id|>", "</s>"):
        written = written.removesuffix(end)
    return written


def without_ids(calls: tuple[ToolCall, ...]) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in calls]


def check_round_trip(name: str, calls: list[ToolCall]) -> None:
    given = calls[:1] if name == "llama3" else calls
    format = "qwen_xml" if name == "qwen3_coder" else FORMAT_OF[name]
    found = read_calls(rendered(name, ParsedTurn("", tuple(given), ())), format)
    assert found.errors == ()
    assert found.content.replace("<think>", "").replace("</think>", "").strip() == ""
    assert without_ids(found.calls) == without_ids(tuple(given))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "hermes3", "llama3", "mistral", "mistral_small"])
@settings(max_examples=20)
@given(calls)
@example([ToolCall("add", {"a": "</tool_call>", "b": "[TOOL_CALLS]"}), ToolCall("add", {})])
@example([ToolCall("add", {"a": "\n</think>\n", "b": '"}]', "c": [1.5, None, {"d": True}]})])
def test_calls_that_a_template_writes_are_read_back(name: str, calls: list[ToolCall]) -> None:
    check_round_trip(name, calls)


@settings(max_examples=20)
@given(plain_calls)
def test_calls_in_xml_are_read_back(calls: list[ToolCall]) -> None:
    check_round_trip("qwen3_coder", calls)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("format", JSON)
@settings(max_examples=25)
@given(calls)
@example([ToolCall("add", {"a": "```"}), ToolCall("add", {"a": "</tool_call>\n```tool\n"})])
def test_calls_that_covey_writes_are_read_back(format: str, calls: list[ToolCall]) -> None:
    found = read_calls(write_calls(calls, format), format)
    assert without_ids(found.calls) == without_ids(tuple(calls))
    assert (found.content, found.errors) == ("", ())


@pytest.mark.parametrize("format", OTHERS)
@settings(max_examples=20)
@given(plain_calls)
def test_calls_with_texts_are_read_back_in_every_other_format(format: str, calls: list[ToolCall]) -> None:
    found = read_calls(write_calls(calls, format), format)
    assert (without_ids(found.calls), found.errors) == (without_ids(tuple(calls)), ())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("format", NAMES)
@settings(max_examples=60)
@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=25).map("".join))
@example("")
@example('<tool_call>{"name": "add", "arguments": ' + '{"a":' * 50_000)
@example('{"name": "add", "parameters": {"a": ' + "9" * 5000 + "}}")
@example('[TOOL_CALLS] [{"name": "add", "arguments": {"a": NaN}}]')
@example("[TOOL_CALLS]add[ARGS]" + "[" * 50_000)
@example("```tool\n" + "9" * 5000)
@example(" " * 100_000)
@example("<tool_call>" * 20_000)
@example("<tool_call><function=add>" + "<parameter=a>" * 5000)
def test_no_text_raises(format: str, text: str) -> None:
    found = read_calls(text, format)
    assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in found.calls)
    assert all(error.startswith("Error: ") for error in found.errors)
    assert len(found.calls) + len(found.errors) <= MOST_CALLS or found.calls


@pytest.mark.parametrize(
    ("format", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}'),  # no end
        ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "add"}</tool_call>'),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>'),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'),
        ("harmony", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'),
        ("harmony", '<|start|>assistant<|channel|>analysis to=functions.add code<|message|>{"a": 1}'),
        ("lfm2", "<|tool_call_start|>[add(a=1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>add(a=1)"),
        ("olmo3", "<function_calls>\nadd(a = 1)\n</function_calls>"),
        ("pythonic", "<|python_start|>[add(a=1)]<|python_end|>"),
        ("llama3", '<|python_start|><|python_end|>{"name": "add", "parameters": {"a": 1}}'),
        ("cohere1", 'Action:```json\n[{"tool_name": "add", "parameters": {"a": 1}}]\n```'),
        ("gemma4", '<|tool_call>call:add{"a": 1}<tool_call|>'),
        ("kimi", '<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{"a": 1}'),
        ("llama3", ' {"name": "add", "parameters": {"a": 1}}'),
        ("llama3", '{"parameters": {"a": 1}, "name": "add"}'),
        ("llama3", '{"arguments": "{\\"a\\": 1}", "name": "add"}'),
        ("llama3", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]'),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}'),
        ("mistral", '[TOOL_CALLS]add [ARGS] {"a": 1}'),
        ("fenced", '```tool\n{"name": "add", "arguments": {"a": 1}}\n```'),
        ("fenced", '```tool\n{"name": "add", "arguments": {"a": 1}}'),
    ],
)  # fmt: skip
def test_variants_of_a_call(format: str, written: str) -> None:
    for before in ("", "I add.\n") if format not in (*WHOLE, "harmony") else ("",):
        found = read_calls(before + written, format)
        assert without_ids(found.calls) == [("add", {"a": 1})]
        assert (found.content, found.errors) == (before.strip(), ())
    assert found.calls[0].id in ("000000000", "abcdefghi", "functions.add:3")


@pytest.mark.parametrize(
    ("format", "written", "reason"),
    [
        ("hermes", '<tool_call>{"name": "add", </tool_call>', "it is not valid JSON: Expecting property name"),
        ("hermes", "<tool_call>add(1, 2)</tool_call>", "it is not valid JSON: Expecting value"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "it has no name of a tool"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "its arguments are not a JSON object"),
        ("hermes", '<tool_call>{"name": "a\\ud800"}</tool_call>', "it has no name of a tool"),
        ("fenced", '```tool\n{"name": "add", "arguments": {"a": ["\\ud800"]}}\n```', "it has half of a surrogate pair"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a\\udfff": 1}', "it has half of a surrogate pair"),
        ("llama3", '{"parameters": {"a": 1}}', "it has no name of a tool"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            "it is not valid JSON: NaN is not a number",
        ),
        ("hermes", '<tool_call>{"name": "add"} and more</tool_call>', "there is other text after it"),
        ("nemotron", "<TOOLCALL>[7]</TOOLCALL>", "it is not a JSON object"),
        ("glm", "<tool_call>add", "it has no </tool_call> at its end"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>", "there is other text after it"),
        ("hunyuan", "<tool_call>add</tool_call>", "it has no NAME\n```json"),
        ("deepseek31", "<｜tool▁calls▁begin｜>add", "it has no <｜tool▁call▁begin｜>"),
        ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>", "its arguments have no names"),
        ("lfm2", "<|tool_call_start|>[add(a=b)]<|tool_call_end|>", "an argument is not a value"),
        ("olmo3", "<function_calls>add(a=1</function_calls>", "it is not a call as in Python: "),
        ("olmo3", "<function_calls>x = add(a=1)</function_calls>", "it is not a call as in Python"),
        ("gemma4", "<|tool_call>call:add{a:x y}<tool_call|>", "its arguments cannot be read"),
        ("qwen_xml", "<tool_call>add</tool_call>", "it has no <function=NAME>"),
        ("qwen_xml", "<tool_call><function=add><parameter=a>1</tool_call>", "it has no </function>"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}', "it is not valid JSON"),
        ("llama3", '<|python_tag|>search.call(query="x")', "it is not valid JSON"),
        ("mistral", "[TOOL_CALLS]add(1)", "it is not valid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]1", "its arguments are not a JSON object"),
        ("fenced", "```tool\nadd(1, 2)\n```", "it is not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_answered_with_its_reason_and_the_format(
    format: str, written: str, reason: str
) -> None:
    found = read_calls(written, format)
    assert found.calls == ()
    [error] = found.errors
    [unread] = found.unread
    assert unread.strip() in written
    assert unread.strip()
    assert error.startswith(f"Error: a tool call cannot be read: {reason}")
    assert read_calls(error.partition("Write calls like this: ")[2], format).calls[0].name == "NAME"


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize(
    "text", ["The answer is 42.", "", '{"answer": 42}', "```python\nprint(1)\n```", "`tool` {}", "[1, 2]"]
)
def test_other_text_is_content(format: str, text: str) -> None:
    assert read_calls(text, format) == ParsedTurn(text, (), ())


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    found = read_calls(f"a{good}b<tool_call>oops</tool_call>c{good}d", "hermes")
    assert (found.content, len(found.calls), len(found.errors)) == ("abcd", 2, 1)
    assert found.unread == ("oops",)
    assert found.message()["unread_calls"] == ["oops"]


def test_a_call_within_the_thinking_is_no_call() -> None:
    call = write_calls([ToolCall("add", {})], "hermes")
    for thought in (f"<think>\n{call}\n</think>\n", f"I could write {call}\n</think>\n"):
        assert read_calls(thought, "hermes").calls == ()
        assert read_calls(thought + call, "hermes").calls == (ToolCall("add", {}),)
    assert read_calls(f"<think>\n{call}", "hermes").calls == ()


@pytest.mark.parametrize("format", JSON)
def test_null_is_no_arguments(format: str) -> None:
    written = write_calls([ToolCall("now", {})], format)
    assert written.count("{}") == 1
    assert read_calls(written.replace("{}", "null"), format).calls == (ToolCall("now", {}),)


@pytest.mark.parametrize("format", NAMES)
def test_thinking_ends_at_its_mark_outside_of_calls(format: str) -> None:
    """Wherever in a line it stands; its beginning may be in the prompt."""
    end = formats()[format].thinking[1]
    call, other = ToolCall("add", {"a": f"x{end}y"}), ToolCall("add", {"a": "z"})
    written, rest = write_calls([call], format), write_calls([other], format)
    alone = format in (*WHOLE, "fenced")  # whose calls begin a turn or a line
    for thought in (f"{written}{end}", f"So {rest} and\n{end}", f"<tool_call>{{ ```tool [TOOL_CALLS] {end}"):
        assert read_calls(thought, format).calls == ()
        found = read_calls(thought + ("\n" if alone else "") + rest, format)
        assert [each.arguments for each in found.calls] == [{"a": "z"}]
        assert found.errors == ()
    assert [each.arguments for each in read_calls(written, format).calls] == [{"a": f"x{end}y"}]


@pytest.mark.parametrize(("marks", "frame"), THINKING)
def test_thinking_is_shown_with_the_marks_of_all_models(marks: tuple[str, str], frame: str) -> None:
    first, last = marks
    format = replace(FORMATS["hermes"], thinking=marks, frame=frame)
    thought, call = format.write([ToolCall("add", {})]), ToolCall("add", {"a": f"x{last}"})
    found = format.read(f"{first}I {thought}{last}It is.{format.write([call])}")
    assert (found.content, found.errors) == (f"<think>I {thought}</think>It is.", ())
    assert without_ids(found.calls) == [("add", call.arguments)]


def test_a_turn_has_a_limited_number_of_calls() -> None:
    call = ToolCall("add", {})
    assert len(read_calls(write_calls([call] * (MOST_CALLS + 5), "fenced"), "fenced").calls) == MOST_CALLS


def test_messages_have_an_id_that_every_template_accepts() -> None:
    assert ToolCall("add", {}, "call 1").reply("3")["tool_call_id"] == "000000000"
    ids = [call.id for call in read_calls(write_calls([ToolCall("add", {})] * 2, "hermes"), "hermes").calls]
    assert ids == ["000000000", "000000001"]
    call = ToolCall("add", {"a": 1}, "abcdefghi")
    assert call.reply("3") == {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "3"}
    assert ParsedTurn("I add.", (call,), ()).message() == {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    assert "tool_calls" not in ParsedTurn("5", (), ()).message()
