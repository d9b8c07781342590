"""What is trained of given conversations is decoded: a rollout of the same model reads it as the calls of the row."""

import copy
import json

import pytest

from covey.config import ConfigError
from covey.config.sft import SFTConfig
from covey.data import EndReason
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.sampler import Conversation, Limits
from covey.llm.conversation.styles import Style, call_format
from covey.llm.conversation.tools import Tool, describe_tools
from covey.llm.data.rows import encode_fitting
from covey.llm.data.sft_examples import check_rows
from covey.llm.generation.generator import Completion
from covey.llm.model.chat import Chat
from covey.llm.sft.encoding import SFT_OPTIONS, ExampleEncoder
from helpers.chat_models import CHAT_MODELS, chat_of
from helpers.in_threads import EnvironmentThreads
from helpers.tool_templates import FORMATS, TEMPLATES, chat_with

USER = {"role": "user", "content": "What is 17 + 25?"}
ANSWER = {"role": "assistant", "content": "It is 42."}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["a", "b"],
        },
    },
}
TOOL = Tool("add", SCHEMA)


def call(arguments: object, id: str = "call_1") -> dict:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def turn(*calls: dict, content: str | None = None) -> dict:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def reply(content: str, id: str = "call_1") -> dict:
    return {"role": "tool", "tool_call_id": id, "content": content}


def encode(chat: Chat, row: dict, tools: list[Tool] | None = None):
    examples = check_rows(SFTConfig(), [("row 7", row)])
    return encode_fitting(examples, ExampleEncoder(chat, tools).encode, None, drop=False, options=SFT_OPTIONS)[0]


def trained(chat: Chat, encoded) -> list[str]:
    """The text of each turn that is trained, without its end token."""
    turns, run = [], []
    for token, decided in zip((*encoded.actions, None), (*encoded.decided, False), strict=True):
        if decided:
            run.append(token)
        elif run:
            assert run[-1] in chat.end_ids
            turns.append(chat.tokenizer.decode(run[:-1]))
            run = []
    return turns


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_given_conversation_is_encoded_as_if_the_model_had_written_it(name: str) -> None:
    chat = chat_of(name)
    messages = [USER, {**ANSWER, "content": "a b"}, {"role": "user", "content": "why?"}, ANSWER]
    encoded = encode(chat, {"messages": messages})
    assert encoded.prompt == chat.encode([USER])
    ids = [*encoded.prompt, *encoded.actions]
    rendered = list(chat.encode_whole(messages))
    if name != "qwen3":  # leaves the thinking out of earlier turns, which the model has written all the same
        assert ids == rendered[: len(ids)]
        assert not chat.tokenizer.decode(rendered[len(ids) :]).strip()
    first, last = trained(chat, encoded)
    assert "a b" in first
    assert "It is 42." in last
    assert "why" not in first + last
    assert len(encoded.decided) == len(encoded.actions)


def test_two_turns_without_a_message_between_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="two messages of the role 'assistant' in a row"):
        encode(chat_of("smollm"), {"messages": [USER, ANSWER, ANSWER]})


WRITTEN = {
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>',
    "qwen3": '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 17, "b": 25}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 17, "b": 25}, "id": "000000000"}]',
    "smollm": '```tool\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n```',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_taught_in_the_format_of_the_template(name: str) -> None:
    chat = chat_of(name)
    encoded = encode(chat, {"messages": [USER, turn(call(SUM)), reply("42"), ANSWER], "tools": [SCHEMA]})
    assert trained(chat, encoded)[0].strip() == WRITTEN[name]


SUM = {"a": 17, "b": 25}
NOTED = {**SUM, "note": 'say "ü" </think>\n{x} [1]'}
# Name -> the messages after the prompt, with the arguments of the calls of the first turn and its text.
TURNS = {
    "one call": ([turn(call(SUM)), reply("42"), ANSWER], [SUM], ""),
    "arguments as JSON text": ([turn(call(json.dumps(NOTED))), reply("42"), ANSWER], [NOTED], ""),
    "two calls": (
        [turn(call(SUM, "x"), call(NOTED, "y")), reply("42", "x"), reply("42", "y"), ANSWER], [SUM, NOTED], "",
    ),
    "a call after text": ([turn(call(SUM), content="I add."), reply("42"), ANSWER], [SUM], "I add."),
    "a call at the end": ([turn(call(SUM))], [SUM], ""),
}  # fmt: skip
REFUSED = {("llama3", "a call after text")}  # no call there


@pytest.mark.parametrize("given", ["own", "of the recipe", "none"])
@pytest.mark.parametrize("row", TURNS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_trained_is_read_as_the_calls_of_the_row(name: str, row: str, given: str) -> None:
    chat = chat_with(name)
    messages, arguments, text = TURNS[row]
    columns = {"messages": [USER, *messages], **({"tools": [SCHEMA]} if given == "own" else {})}
    tools = [TOOL] if given == "of the recipe" else None
    if (name, row) in REFUSED:
        with pytest.raises(ConfigError, match=r"^row 7: "):
            encode(chat, columns, tools)
        return
    encoded = encode(chat, columns, tools)
    first, *rest = trained(chat, encoded)
    read = call_format(chat, [TOOL]).read(first)
    assert read.errors == ()
    if given != "none":
        style = Style(chat, "tools", [TOOL])
        requests = style.read(encoded.actions[: encoded.decided.index(False) - 1 if rest else -1]).request
        assert requests == {"do": "call", "calls": [{"name": "add", "arguments": each} for each in arguments]}
        assert encoded.prompt == style.encode([USER]), "the prompt of a rollout with this tool"
        assert chat.tokenizer.decode(encoded.prompt).count("Adds.") == (name != "qwen3_coder"), "which its text omits"
    elif name != "qwen3_coder":  # whose arguments have no types
        assert [(each.name, each.arguments) for each in read.calls] == [("add", each) for each in arguments]
    assert read.content.replace("<think>", "").replace("</think>", "").strip() == text
    assert [each.strip().removeprefix("<think>\n\n</think>\n\n") for each in rest] == ["It is 42."] * (
        len(messages) > 1
    )
    between = [token for token, decided in zip(encoded.actions, encoded.decided, strict=True) if not decided]
    assert chat.tokenizer.decode(between).count("42") == max(0, len(messages) - 2)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_replies_in_a_prompt_are_read_by_the_model(name: str) -> None:
    chat = chat_with(name)
    earlier = [USER, turn(call('{"a": 17, "b": 25}')), reply("The sum: 42"), ANSWER]
    encoded = encode(chat, {"prompt": [*earlier, {"role": "user", "content": "Sure?"}], "completion": "Yes."}, [TOOL])
    prompt = chat.tokenizer.decode(encoded.prompt)
    assert "17" in prompt.partition("What is 17 + 25?")[2].partition("The sum")[0], "the call"
    assert "The sum: 42" in prompt
    assert '\\"a' not in prompt, "arguments that are text are not encoded again"


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_text_of_a_recipe_with_conversations_is_a_message(name: str) -> None:
    chat = chat_of(name)
    text = encode(chat, {"prompt": USER["content"], "completion": "It is 42."}, [TOOL])
    assert text == encode(chat, {"messages": [USER, ANSWER]}, [TOOL])
    assert text.prompt == Style(chat, "tools", [TOOL]).encode([USER])


THINKING = {"role": "assistant", "content": "It is 42.", "reasoning_content": "17 and 25"}
WRONG = {
    "another tool": (turn({"function": {"name": "sub", "arguments": SUM}}), "there is no tool 'sub'"),
    "a type": (turn(call({"a": "x", "b": 1})), "the argument 'a' of add must be an integer"),
    "a missing argument": (turn(call({"a": 1})), "add needs the argument 'b'"),
    "no arguments": (turn(call(None)), "add needs the argument 'a'"),
    "half a pair": (turn(call({**SUM, "note": "\ud800"})), "half of a surrogate pair"),
    "no JSON": (turn(call("{a}")), "its arguments are not a JSON object"),
    "no name": (turn({"function": {"arguments": {}}}), "it has no name of a tool"),
    "no call": (turn("add"), "it is not a JSON object"),
    "no number": (turn(call({**SUM, "note": float("nan")})), "cannot be written"),
    "unread": ({**ANSWER, "unread_calls": ["add(1)"]}, "unread_calls"),
    "in the text": (
        {"role": "assistant", "content": '```tool\n{"name": "sub", "arguments": {}}\n```'}, "there is no tool 'sub'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_a_rollout_would_not_read_so_is_refused(case: str) -> None:
    message, fault = WRONG[case]
    with pytest.raises(ConfigError, match=rf"^row 7: .*{fault}") as refused:
        encode(chat_of("smollm"), {"messages": [USER, message]}, [TOOL])
    assert "\n" not in str(refused.value)


def test_thinking_that_a_template_leaves_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves out the 'reasoning_content' of a message"):
        encode(chat_of("smollm"), {"messages": [USER, THINKING]})
    tokenizer = copy.deepcopy(chat_of("smollm").tokenizer)
    tokenizer.chat_template = TEMPLATES["smollm"].replace(
        "message['content']", "(message.reasoning_content or '') + message['content']"
    )
    chat = Chat(tokenizer, chat_of("smollm").end_ids)
    assert trained(chat, encode(chat, {"messages": [USER, THINKING]})) == ["17 and 25It is 42."]


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_template_that_leaves_out_calls_does_not_render_them(name: str) -> None:
    chat = chat_of(name)
    messages = [USER, turn(call('{"a": 17, "b": 25}', "abcdefghi"), content=""), reply("42", "abcdefghi")]
    if FORMATS[name] == "fenced":
        with pytest.raises(ConfigError, match="leaves out the tool calls of a message"):
            chat.render(messages)
    else:
        assert '{"a": 17, "b": 25}' in chat.render(messages)


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        ("x", "is a text that is not JSON"), ({"a": 1}, "must be a list of JSON schemas"),
        ([7], "entry 1 of 'tools' is not a JSON schema of a function"), ([SCHEMA, {"type": "function"}], "entry 2"),
        ([{"name": "a", "parameters": 3}], "needs 'parameters'"),
        ([{"name": "a", "parameters": {"properties": {"x": 3}}}], "needs 'parameters'"),
        ([{"name": "a", "parameters": {"required": "x"}}], "'required', which must be a list"),
    ],
)  # fmt: skip
def test_schemas_that_describe_no_function_are_refused(tools: object, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        encode(chat_of("smollm"), {"messages": [USER, ANSWER], "tools": tools})


def test_schemas_of_other_libraries_are_understood() -> None:
    others = {
        "name": "add", "description": "Adds.",
        "parameters": {
            "type": "dict", "required": None,
            "properties": {
                "a": {"type": "float"}, "b": {"type": ["integer", "null"]},
                "c": {"type": "object", "properties": {"d": {"type": "string"}}, "additionalProperties": True},
            },
        },
    }  # fmt: skip
    chat, arguments = chat_of("smollm"), {"a": 1, "b": None, "c": {"d": "x", "e": 2}}
    encoded = encode(chat, {"messages": [USER, turn(call(arguments))], "tools": json.dumps([others])})
    assert call_format(chat).read(trained(chat, encoded)[0]).calls[0].arguments == arguments
    with pytest.raises(ConfigError, match=r"has an entry 'd' that must be a string"):
        encode(chat, {"messages": [USER, turn(call({"c": {"d": 1}}))], "tools": [others]})
    no_arguments = {"messages": [USER, turn({"name": "now", "arguments": None})], "tools": [{"name": "now"}]}
    assert call_format(chat).read(trained(chat, encode(chat, no_arguments))[0]).calls[0].arguments == {}


def test_the_encoder_of_turns_is_that_of_rollouts() -> None:
    chat = chat_of("mistral")
    messages = [USER, turn(call(SUM)), reply("42"), ANSWER]
    encoded = encode(chat, {"messages": messages}, [TOOL])
    begin, end = encoded.decided.index(False), len(encoded.decided) - encoded.decided[::-1].index(False)
    read = Style(chat, "tools", [TOOL]).read(encoded.actions[: begin - 1])
    replies = Style(chat, "tools", [TOOL]).take(read, {"texts": ["42"]}).replies
    assert encoded.actions[begin:end] == ConversationEncoder(chat).after_turn(replies, ended=True)


class Adder:
    """Adds."""

    def add(self, a: int, b: int, note: str = "") -> str:
        """Adds.

        Args:
            a: first
            b: second
            note: any
        """
        return str(a + b)


@pytest.mark.parametrize("name", [name for name, model in CHAT_MODELS.items() if len(model.ends) > 1])
def test_a_turn_that_a_special_token_ended_as_a_stop_string_is_as_one_that_the_end_token_ended(name: str) -> None:
    """The template's end of a turn, which this model does not declare as an end token."""
    declared = chat_of(name)
    end = declared.tokenizer.convert_tokens_to_ids(CHAT_MODELS[name].ends[0])
    written = encode(declared, {"messages": [USER, turn(call(SUM))]}, [TOOL]).actions
    assert written[-1] == end
    found = []
    for chat in (declared, Chat(declared.tokenizer, declared.end_ids - {end})):
        session = EnvironmentThreads(Adder).open(0)
        encoder, style = ConversationEncoder(chat), Style(chat, "tools", describe_tools(Adder))
        one = Conversation(session, style, encoder, Limits(9, 99, 999))
        one.begin(USER["content"], session.ask({"do": "reset", "columns": {}}))
        completion = Completion(list(written), [-1.0] * len(written), EndReason.STOP, 0)
        found.append((one.answer(completion).result(60), one.messages))
        assert one.failure == ""
        session.close()
    assert found[0] == found[1]
    assert found[0][0] is not None
    assert found[0][1][1]["content"] == "42"
