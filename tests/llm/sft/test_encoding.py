"""Sources of examples, their tokens, and which of them are trained."""

import json
from functools import partial
from types import SimpleNamespace

import pytest

from covey.config import ChatConfig, ConfigError
from covey.config.sft import SFTConfig
from covey.llm.conversation.environments.calculator import Calculator
from covey.llm.conversation.styles import Style
from covey.llm.conversation.tool_calls import ToolCall
from covey.llm.conversation.tools import describe_tools
from covey.llm.data.rows import encode_fitting
from covey.llm.data.sft_examples import check_rows
from covey.llm.model.chat import Chat
from covey.llm.sft.encoding import SFT_OPTIONS, ExampleEncoder, calculator_examples, longest_example
from covey.llm.sft.function_rows import read_function
from covey.llm.tasks import Arithmetic
from covey.llm.tasks.generated import is_held_out
from helpers.chat_models import CHAT_MODELS, chat_of
from helpers.tiny_models import tiny_tokenizer

QUESTION = {"role": "user", "content": "What is 17 + 25?"}
ANSWER = {"role": "assistant", "content": "It is 42."}


def examples_of(*rows, **fields):
    return check_rows(SFTConfig(**fields), [(f"row {number}", row) for number, row in enumerate(rows, start=1)])


def encode(chat, row):
    encode_one = ExampleEncoder(chat).encode
    (encoded,) = encode_fitting(examples_of(row), encode_one, None, drop=False, options=SFT_OPTIONS)
    return encoded


def trained(chat, encoded):
    """The texts of the stretches that are trained, with control tokens."""
    texts, run = [], []
    for token, decided in zip((*encoded.actions, None), (*encoded.decided, False), strict=True):
        if decided:
            run.append(token)
        elif run:
            texts.append(chat.tokenizer.decode(run))
            run = []
    return texts


def test_a_text_is_completed_by_its_tokens_and_an_end_token():
    chat = Chat(tiny_tokenizer(), frozenset({1}))
    encoded = encode(chat, {"prompt": "1+2=", "completion": "3"})
    assert encoded.prompt == chat.encode("1+2=")
    assert encoded.actions == (*chat.encode_text("3"), 1)
    assert encoded.decided == (True, True)
    assert encoded.tokens == 6
    again = encode(chat, {"prompt": "1+2=", "completion": "3<end>"})
    assert again == encoded, "an end token that is there already is not appended"


def test_questions_and_messages_of_sharegpt_are_those_of_their_chat() -> None:
    whole = examples_of({"messages": [QUESTION, ANSWER]})
    asked, answered = QUESTION["content"], ANSWER["content"]
    assert examples_of({"prompt": None, "question": asked, "answer": answered}, completion_column="answer") == whole
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]
    assert examples_of({"conversations": turns}, messages_column="conversations") == whole
    (found,) = examples_of({"messages": [{"from": "system", "value": "Add."}, *turns]})
    assert found.prompt == ({"role": "system", "content": "Add."}, QUESTION)
    with pytest.raises(ConfigError, match=r"row 1: message 1 of 'messages' needs a 'content' that is a string"):
        examples_of({"messages": [{"from": "human", "text": asked}]})


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_only_turns_of_the_assistant_are_trained_each_with_its_end_token(name):
    chat, end = chat_of(name), CHAT_MODELS[name].ends[0]
    again = {"role": "user", "content": "And 2 + 2?"}
    four = {"role": "assistant", "content": "It is 4."}
    encoded = encode(chat, {"messages": [QUESTION, ANSWER, again, four]})
    first, second = trained(chat, encoded)
    thinking = "<think>\n\n</think>\n\n" if name == "qwen3" else ""  # which its template writes before every answer
    assert (first.strip(), second.strip()) == (f"{thinking}It is 42.{end}", f"{thinking}It is 4.{end}")
    assert encoded.prompt == chat.encode([QUESTION])
    assert encoded.decided[-1]
    whole = chat.tokenizer.decode(encoded.prompt + encoded.actions)
    assert "And 2 + 2?" in whole
    pair = encode(chat, {"prompt": [QUESTION], "completion": "It is 42."})
    assert trained(chat, pair) == trained(chat, encoded)[:1]
    assert encode(chat, {"prompt": [QUESTION, ANSWER, again], "completion": [four]}).prompt == chat.encode(
        [QUESTION, ANSWER, again]
    ), "an answer within a prompt is not trained"


@pytest.mark.parametrize("name", [name for name, kind in CHAT_MODELS.items() if name != "qwen3"])
def test_calls_are_trained_and_replies_of_tools_are_not(name):
    chat = chat_of(name)
    for row in calculator_examples(2):
        encoded = encode(chat, row)
        answer = row["messages"][-1]["content"]
        call, last = trained(chat, encoded)
        assert "calculate" in call
        assert answer in last
        assert all(part not in call for part in ("What is", answer))
        reply = chat.tokenizer.decode([t for t, d in zip(encoded.actions, encoded.decided, strict=True) if not d])
        assert answer in reply
        assert "calculate" in chat.tokenizer.decode(encoded.prompt)


def test_the_chat_table_adds_to_the_prompt_as_it_does_in_training():
    plain = chat_of("smollm")
    chat = plain.with_config(ChatConfig(system_prompt="Be brief.", examples=("What is 1 + 1?", "2")))
    row = {"messages": [QUESTION, ANSWER]}
    encoded = encode(chat, row)
    assert encoded.prompt == chat.encode([QUESTION]) != plain.encode([QUESTION])
    assert encoded.actions == encode(plain, row).actions


def test_long_examples_are_refused_or_dropped():
    chat = Chat(tiny_tokenizer(), frozenset({1}))
    examples = examples_of({"prompt": "1+2=", "completion": "3"}, {"prompt": "1+2=", "completion": "33"})
    fitting = partial(encode_fitting, examples, ExampleEncoder(chat).encode, options=SFT_OPTIONS)
    assert len(fitting(7, drop=False)) == 2
    with pytest.raises(ConfigError, match=r"row 2: prompt and completion have 7 tokens, and at most 6 are trained"):
        fitting(6, drop=False)
    assert len(fitting(6, drop=True)) == 1
    with pytest.raises(ConfigError, match="every example has more than 5 tokens"):
        fitting(5, drop=True)
    config = SimpleNamespace(max_position_embeddings=64)
    config.get_text_config = lambda: config
    assert longest_example(config, 0) == 64
    assert longest_example(config, 9) == 9
    assert longest_example(config, 100) == 64


def test_mistakes_of_encoding_name_the_row():
    with pytest.raises(ConfigError, match="the model declares no end token"):
        ExampleEncoder(Chat(tiny_tokenizer(), frozenset()))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"row 1: .*no chat template"):
        encode(Chat(tokenizer, frozenset({1})), {"messages": [QUESTION, ANSWER]})
    with pytest.raises(ConfigError, match=r"row 1: .*two messages of the role 'assistant' in a row"):
        encode(chat_of("smollm"), {"messages": [QUESTION, ANSWER, ANSWER]})


@pytest.mark.slow
def test_rows_of_a_function(tmp_path):
    file = tmp_path / "data.py"
    file.write_text(
        "print('loading')\n"
        "def rows():\n    return ({'prompt': f'{n}+1=', 'completion': str(n + 1)} for n in range(3))\n"
        "def none():\n    return []\n"
        "def wrong():\n    return ['a']\n"
        "def fails():\n    raise OSError('no such table')\n"
    )
    found = read_function(f"{file}:rows")
    assert [row for _, row in found] == [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(3)]
    assert found[1][0] == f"row 2 of {file}:rows"
    with pytest.raises(ConfigError, match="none returned no rows"):
        read_function(f"{file}:none")
    with pytest.raises(ConfigError, match=r"wrong failed: TypeError: row 1 is of type str, and a dict is needed"):
        read_function(f"{file}:wrong")
    with pytest.raises(ConfigError, match="fails failed: OSError: no such table"):
        read_function(f"{file}:fails")


CALCULATOR_TOOLS = describe_tools(Calculator)


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_examples_of_the_calculator_are_conversations_that_the_model_can_write(name: str) -> None:
    chat = chat_of(name)
    style = Style(chat, "tools", CALCULATOR_TOOLS)
    rows = calculator_examples(count=3, seed=1)
    assert rows == calculator_examples(count=3, seed=1)
    assert rows != calculator_examples(count=3, seed=2)
    for row in rows:
        question, _, reply, answer = row["messages"]
        left, right = map(int, question["content"].removeprefix("What is ").rstrip("?").split(" + "))
        assert answer == {"role": "assistant", "content": str(left + right)}
        assert (reply["role"], reply["content"]) == ("tool", str(left + right))
        assert not is_held_out(f"arithmetic {sorted((1, [number]) for number in (left, right))}")
        [example] = check_rows(SFTConfig(), [("row", row)])
        encoded = ExampleEncoder(chat).encode(example)
        assert encoded.prompt == style.encode([question]), "as a conversation with the calculator begins"
        read = style.read(encoded.actions[: encoded.decided.index(False) - 1])
        [call] = read.calls
        assert call == ToolCall("calculate", {"expression": f"{left} + {right}"}, call.id)
        assert style.reply_roles == (("user",) if name == "gemma" else ("tool",))


def test_examples_are_rows_of_json() -> None:
    rows = calculator_examples(count=2, task=Arithmetic(digits=(2,), operators=("-",)))
    assert json.loads(json.dumps(rows)) == rows
    with pytest.raises(ConfigError, match="at least one example"):
        calculator_examples(count=0)
