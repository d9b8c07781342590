"""The format of calls is the one that reads what the chat template writes; a template that nothing reads is refused."""

from typing import Any

import pytest

from covey.config import ConfigError
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.styles import Style, call_format
from covey.llm.conversation.tool_calls import FORMATS as ROWS
from covey.llm.conversation.tool_calls import ToolCall
from covey.llm.conversation.tools import Tool
from covey.llm.model.chat import Chat
from helpers.chat_models import chat_of
from helpers.tool_templates import FAMILIES, FORMATS, FRAMES, TEMPLATES, UNMARKED, chat_with, formats
from llm.conversation.test_tool_calls import WHOLE

USER = {"role": "user", "content": "What is 17 + 25?"}
KINDS = {"a": "integer", "b": "number", "note": "string", "deep": "object", "on": "boolean", "none": "null"}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}},
    },
}
TOOL = Tool("add", SCHEMA)
SUM = {"a": 17, "b": 2.5}
RICH = {
    "note": "say \"ü\"\n{x} [1], ('it')",
    "deep": {"x": [1, -2.5, True, None, {"y": "z", "a key": {}}]},
    "on": False,
    "none": None,
}
CALLS: dict[str, list[dict[str, Any]]] = {"one": [SUM], "none": [{}], "rich": [RICH], "several": [SUM, RICH, {}]}


def turn_of(arguments: list[dict[str, Any]], content: str = "") -> dict[str, Any]:
    calls = [ToolCall("add", each, f"functions.add:{place}").message() for place, each in enumerate(arguments)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def read(chat: Chat, text: str) -> list[dict[str, Any]]:
    """The arguments of the calls of a turn as the environment gets them."""
    request = Style(chat, "tools", [TOOL]).read(chat.encode_text(text)).request
    assert request is not None, text
    assert {call["name"] for call in request["calls"]} == {"add"}
    return [call["arguments"] for call in request["calls"]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_found_by_what_the_template_writes(name: str) -> None:
    assert call_format(chat_with(name), [TOOL]).name == FORMATS[name]


def test_a_model_without_a_template_writes_fenced_calls() -> None:
    chat = chat_with("smollm")
    chat.tokenizer.chat_template = None
    assert call_format(chat, [TOOL]).name == "fenced"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_that_a_template_writes_are_read_back(name: str) -> None:
    chat = chat_with(name)
    format = call_format(chat, [TOOL])
    assert format.name == (name if name in ROWS else "of the template")
    encoder = ConversationEncoder(chat)
    for case, arguments in CALLS.items():
        text = encoder.own_text(turn_of(arguments))
        assert read(chat, text) == arguments, (case, text)
        assert format.read(format.write([ToolCall("add", each) for each in arguments])).content == ""
        first, last = format.thinking
        thought = f"{first}I could write {text.replace(first + last, '')} here{last}"
        assert read(chat, f"{thought}{text}") == arguments, case
        assert format.read(thought).calls == ()
        if name not in WHOLE:
            found = format.read(f"I add.\n{text}")
            assert found.content.replace("<think></think>", "").strip() == "I add."
            assert len(found.calls) == len(arguments)


def test_a_format_is_observed_in_what_the_template_writes() -> None:
    """Marks of the turn, of a call, and of an argument."""
    found = call_format(chat_with("deepseek_xml"))
    assert (found.turn, found.between) == ("\n<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>", "")
    assert found.call == '<｜DSML｜invoke name="{name}">\n{xml}</｜DSML｜invoke>\n'
    assert found.argument == '<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n'
    assert found.kinds == ("true", "false")
    assert call_format(chat_with("numbered")).call.startswith("<|call:begin|>{id}<|call:name|>{name}")
    assert call_format(chat_with("gemma4")).quote == '<|"|>'
    assert call_format(chat_with("cohere")).keys == ("tool_name", "parameters", "tool_call_id")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{{ v if v is string", "{{ v | upper if v is string"),  # values that are written otherwise
        ("{{ v if v is string", "{{ v | e if v is string"),
        ("{% for t in m.tool_calls %}", "{% for t in m.tool_calls %}<|im_start|>tool"),  # what ends a turn
    ],
)
def test_what_a_template_does_not_write_alike_is_not_observed(old: str, new: str) -> None:
    chat = chat_with("glm")
    chat.tokenizer.chat_template = FAMILIES["glm"].replace(old, new)
    assert chat.tokenizer.chat_template != FAMILIES["glm"]
    assert call_format(chat).name == "unknown"


def test_the_format_of_a_template_without_calls_is_known_by_the_tokens_of_the_model() -> None:
    chat = chat_with("smollm")
    assert call_format(chat).name == "fenced"
    chat.tokenizer.add_tokens(["<|tool_call_start|>", "<|tool_call_end|>"])
    assert call_format(Chat(chat.tokenizer, chat.end_ids)).name == "lfm2"


def test_a_template_that_always_reads_the_list_of_tools_is_understood() -> None:
    """As of Hermes 2 and 3, which fail without tools."""
    chat = chat_with("hermes3")
    chat.tokenizer.chat_template = TEMPLATES["hermes3"].replace("tools or []", "tools")
    assert chat.tokenizer.chat_template != TEMPLATES["hermes3"]
    style = Style(chat, "tools", [TOOL])
    assert "Adds." in chat.tokenizer.decode(style.encode([USER]))
    assert read(chat, ConversationEncoder(chat).own_text(turn_of([SUM]))) == [SUM]
    assert style.take(style.read(chat.encode_text("")), {}).replies == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_a_limit_cuts_is_not_another_call(name: str) -> None:
    chat = chat_with(name)
    text, format = ConversationEncoder(chat).own_text(turn_of([SUM, {"note": "x"}])), call_format(chat)
    whole = [(call.name, call.arguments) for call in format.read(text).calls]
    assert len(whole) == 2
    for cut in range(len(text)):
        calls = [(call.name, call.arguments) for call in format.read(text[:cut]).calls]
        assert calls == whole[: len(calls)], text[:cut]


def test_a_template_that_always_begins_an_answer_is_understood() -> None:
    """As Cohere's: the beginning of the next answer is not a part of the turn before."""
    chat, begins = chat_with("cohere"), "<|im_start|>assistant\n"
    chat.tokenizer.chat_template = FAMILIES["cohere"].rpartition("{% if add")[0] + f"{{{{ {begins!r} }}}}"
    assert call_format(chat, [TOOL]).call == "<|START_ACTION|>{objects}<|END_ACTION|>"
    text = ConversationEncoder(chat).own_text(turn_of([SUM]))
    assert (read(chat, text), begins in text) == ([SUM], False)


def test_all_of_a_conversation_with_tools_is_written_by_the_template_for_tools() -> None:
    chat = chat_with("smollm")
    chat.tokenizer.chat_template = {"default": TEMPLATES["smollm"], "tool_use": FAMILIES["minimax"]}
    style = Style(chat, "tools", [TOOL])
    encoder = ConversationEncoder(style.chat)
    assert (style.format.turn, Style(chat, "step").chat) == ("<minimax:tool_call>\n{}</minimax:tool_call>", chat)
    assert read(chat, encoder.own_text(turn_of([SUM]))) == [SUM]
    assert "Adds." in style.chat.tokenizer.decode(style.encode([USER]))


OWN_MARKS = FAMILIES["hermes"].replace("<tool_call>", "<<CALL>>").replace("</tool_call>", "<</CALL>>")
DECLARED = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"repeats": True, "join": ""},
        "tool_calls": {
            "open_pattern": r"\s*<<CALL>>", "close": "<</CALL>>", "content": "json", "repeats": True,
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
    },
}  # fmt: skip


def test_a_template_whose_calls_nothing_reads_is_refused_by_name() -> None:
    chat = chat_with("hermes")
    chat.tokenizer.chat_template = UNMARKED
    style = Style(chat, "tools", [TOOL])
    for use in (lambda: style.encode([USER]), lambda: style.read(chat.encode_text("5"))):
        with pytest.raises(
            ConfigError, match=r"writes calls of tools in a format that covey cannot read, 'coveytool"
        ) as refused:
            use()
        assert "\n" not in str(refused.value)
    assert Style(chat, "step").encode([USER]), "conversations without tools need no format"


def test_calls_are_read_as_the_tokenizer_declares() -> None:
    chat = chat_with("hermes")
    chat.tokenizer.chat_template, chat.tokenizer.response_template = OWN_MARKS, DECLARED
    encoder, style = ConversationEncoder(chat), Style(chat, "tools", [TOOL])
    for arguments in CALLS.values():
        assert read(chat, encoder.own_text(turn_of(arguments))) == arguments
    turn = style.read(chat.encode_text(f"<think>hm</think>I add.{encoder.own_text(turn_of([SUM]))}"))
    assert turn.message["content"] == "<think>\nhm\n</think>\n\nI add."
    assert turn.calls[0].arguments == SUM
    broken = style.read(chat.encode_text('<<CALL>>{"name": "add", "arguments": {"a": 1}'))
    assert broken.request is None
    [reply] = broken.replies
    assert "Write calls like this: <<CALL>>" in reply["content"]


def test_a_declaration_that_does_not_read_the_template_is_not_used() -> None:
    chat = chat_with("hermes")
    for declared in (DECLARED, {"fields": 7}, "x"):
        chat = Chat(chat.tokenizer, chat.end_ids)
        chat.tokenizer.response_template = declared
        assert call_format(chat, [TOOL]).name == "hermes"


CALL_ENDS = {"harmony": "<|call|>", "glm": "<|observation|>", "gemma4": "<|tool_response>"}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("text", ["42", 'said "no"\n{x}'])
def test_results_follow_a_call_as_in_one_rendering(name: str, text: str) -> None:
    """Although the token that ends a turn is not that of ChatML, and results belong to calls."""
    chat = chat_of(FRAMES[name])
    encoder, style = ConversationEncoder(chat), Style(chat, "tools", [TOOL])
    assert style.format.call == formats()[name].call
    turn = turn_of([SUM])
    written = chat.encode_text(encoder.own_text(turn))
    end = chat.tokenizer.convert_tokens_to_ids(CALL_ENDS[name])
    result = style.take(style.read(written), {"texts": [text]}).replies
    assert [reply["role"] for reply in result] == ["tool"]
    between = encoder.after_turn(result, ended=True)
    between = between[1:] if between[0] == end else between  # as a rollout does
    ids = [*chat.encode([USER]), *written, end, *between]
    whole = chat.render([USER, turn, *result], answer_begins=True)
    assert chat.tokenizer.decode(ids) == whole
    answer = {"role": "assistant", "content": "It is 42."}
    more = {"role": "user", "content": "Sure?"}
    last = style.read(encoder.turn(answer)[:-1])
    assert last.message["content"].replace("<think></think>", "").strip() == "It is 42."
    after = chat.tokenizer.decode(encoder.after_turn([more], ended=True))
    whole = chat.render([USER, answer, more])
    assert whole.endswith(after)
    assert whole.removesuffix(after).endswith("It is 42.<|end|>" if name == "harmony" else CLOSED[name])


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        (
            "harmony", "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>42",
            "<think>I add.</think>42",
        ),
        ("harmony", "<|channel|>final<|message|>42<|return|>", "42"),
        ("harmony", "<|channel|>analysis<|message|>I a", "<think>I a"),
        ("glm", "<think>I add.</think>42<|user|>", "<think>I add.</think>42"),
    ],
)  # fmt: skip
def test_a_completion_is_decoded_with_its_thinking(name: str, text: str, shown: str) -> None:
    """For rewards, although the marks of its channels are special tokens."""
    chat = chat_of(FRAMES[name])
    assert chat.decode(chat.encode_text(text)) == shown


CLOSED = {"glm": "It is 42.", "gemma4": "It is 42.<turn|>"}
