"""Example conversations with the calculator."""

from __future__ import annotations

import json

import pytest

from covey.config import ConfigError
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.environments.calculator import Calculator
from covey.llm.conversation.tool_calls import ToolCall, read_calls
from covey.llm.conversation.tool_prompt import call_format
from covey.llm.conversation.tools import describe_tools
from covey.llm.conversation.warm_start import calculator_examples
from covey.llm.tasks import Arithmetic
from covey.llm.tasks.generated import is_held_out
from helpers.chat_models import CHAT_MODELS, chat_of

CALCULATOR_TOOLS = describe_tools(Calculator)


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_examples_of_the_calculator_are_conversations_that_the_model_can_write(name: str) -> None:
    chat = chat_of(name)
    format, encoder = call_format(chat, CALCULATOR_TOOLS), ConversationEncoder(chat)
    rows = calculator_examples(chat, count=3, seed=1)
    assert rows == calculator_examples(chat, count=3, seed=1)
    assert rows != calculator_examples(chat, count=3, seed=2)
    for row in rows:
        *prompt, turn, reply, answer = row["messages"]
        left, right = map(int, prompt[-1]["content"].rpartition("What is ")[2].rstrip("?").split(" + "))
        assert answer == {"role": "assistant", "content": str(left + right)}
        assert (reply["role"], reply["content"]) == ("user" if name == "gemma" else "tool", str(left + right))
        assert not is_held_out(f"arithmetic {sorted((1, [number]) for number in (left, right))}")
        written = chat.tokenizer.decode(encoder.turn(turn)[:-1])  # without the end token
        [call] = read_calls(written, format).calls
        assert call == ToolCall("calculate", {"expression": f"{left} + {right}"}, call.id)
        encoded = encoder.conversation(row["messages"], row.get("tools", ()))
        assert set(encoded.decided) == {False, True}


def test_examples_are_rows_of_json() -> None:
    rows = calculator_examples(chat_of("smollm"), count=2, task=Arithmetic(digits=(2,), operators=("-",)))
    assert json.loads(json.dumps(rows)) == rows
    assert rows[0]["messages"][2]["content"].startswith('```tool\n{"name": "calculate", "arguments": {"expression": "')
    with pytest.raises(ConfigError, match="at least one example"):
        calculator_examples(chat_of("smollm"), count=0)
