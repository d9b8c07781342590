"""Reads the examples of a supervised training from the source that its config names."""

from collections.abc import Callable
from typing import Any

from covey.config import ConfigError, RunConfig
from covey.config.sft import is_function
from covey.llm.conversation.environments.calculator import Calculator
from covey.llm.conversation.tool_calls import ToolCall
from covey.llm.conversation.tools import call_tool, describe_tools
from covey.llm.data.rows import Split
from covey.llm.data.sft_examples import Example, check_rows, read_rows, split_examples
from covey.llm.sft.function_rows import read_function
from covey.llm.tasks.arithmetic import Arithmetic

DRAW_STEP = 0  # of `Arithmetic.draw`; training begins at step 1, so that it asks other problems


def calculator_examples(count: int = 200, seed: int = 0, task: Arithmetic | None = None) -> list[dict[str, Any]]:
    """Example conversations with the calculator, for a warm start.

    A small model must know the format of calls before GRPO can help:

    user        What is 123 + 456?
    assistant   the call calculate(expression="123 + 456"), in the format of the model
    tool        579
    assistant   579

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
        question = start.prompt[-1]["content"]  # type: ignore[index]
        call = ToolCall("calculate", {"expression": question.removeprefix("What is ").partition("?")[0]})
        turn = {"role": "assistant", "content": "", "tool_calls": [call.message()]}
        reply = call.reply(call_tool(calculator, call, tools))
        answer = {"role": "assistant", "content": str(start.columns["answer"])}
        rows.append({"messages": [*start.prompt, turn, reply, answer], "tools": [tool.schema for tool in tools]})
    return rows


# Name -> function of the number of examples and the seed, which returns rows.
GENERATED: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {"calculator": calculator_examples}


def read_source(config: RunConfig) -> Split[Example]:
    """The training and the held-out examples of a config.

    Raises:
        ConfigError: for the first unusable row.
    """
    sft = config.sft
    if sft.data in GENERATED:
        rows = GENERATED[sft.data](sft.count, config.seed)
        examples = check_rows(sft, [(f"{sft.data} example {number}", row) for number, row in enumerate(rows, start=1)])
    elif is_function(sft.data):
        examples = check_rows(sft, read_function(sft.data))
    else:
        examples = read_rows(sft, sft.data)
    return split_examples(sft, examples)
