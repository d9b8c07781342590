"""Example conversations with the calculator."""

import json

import pytest

from covey.config import ConfigError
from covey.config.sft import SFTConfig
from covey.llm.conversation.environments.calculator import Calculator
from covey.llm.conversation.styles import Style
from covey.llm.conversation.tool_calls import ToolCall
from covey.llm.conversation.tools import describe_tools
from covey.llm.data.sft_examples import check_rows
from covey.llm.sft.encoding import ExampleEncoder, calculator_examples
from covey.llm.tasks import Arithmetic
from covey.llm.tasks.generated import is_held_out
from helpers.chat_models import CHAT_MODELS, chat_of

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
