"""Example conversations with the calculator, for a warm start: a small model must know a format before GRPO can help.

user        What is 123 + 456?
assistant   the call calculate(expression="123 + 456"), in the format of the model
tool        579
assistant   579
"""

from __future__ import annotations

from typing import Any

from covey.config import ConfigError
from covey.llm.conversation.environments.calculator import Calculator
from covey.llm.conversation.tool_calls import ToolCall
from covey.llm.conversation.tools import call_tool, describe_tools
from covey.llm.tasks.arithmetic import Arithmetic

DRAW_STEP = 0  # of `Arithmetic.draw`; training begins at step 1, so that it asks other problems


def calculator_examples(count: int = 200, seed: int = 0, task: Arithmetic | None = None) -> list[dict[str, Any]]:
    """Rows with `messages` and `tools`.

    Problems are from the training side of the task, so no held-out problem is among them. The same arguments give the
    same rows.

    Args:
        count: number of rows.
        seed: of the problems.
        task: None: sums of three-digit numbers, without an instruction.

    Raises:
        ConfigError: if count is not positive.
    """
    if count < 1:
        raise ConfigError(f"count is {count}, but a warm start needs at least one example")
    task = task or Arithmetic(digits=(3,), operators=("+",), instruction="")
    calculator = Calculator()
    tools = describe_tools(calculator)
    rows = []
    for start in task.draw(seed, DRAW_STEP, count):
        call = ToolCall("calculate", {"expression": _expression(start.prompt[-1]["content"])})  # type: ignore[index]
        turn = {"role": "assistant", "content": "", "tool_calls": [call.message()]}
        reply = call.reply(call_tool(calculator, call, tools))
        answer = {"role": "assistant", "content": str(start.columns["answer"])}
        rows.append({"messages": [*start.prompt, turn, reply, answer], "tools": [tool.schema for tool in tools]})
    return rows


def _expression(question: str) -> str:
    """The expression of a question of `Arithmetic`."""
    return question.removeprefix("What is ").partition("?")[0]
