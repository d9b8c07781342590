"""Reads the examples of a supervised training from the source that its config names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.config import RunConfig
from covey.config.sft import is_function
from covey.llm.conversation.warm_start import calculator_examples
from covey.llm.data.sft_examples import Examples, check_rows, read_rows, split_examples
from covey.llm.sft.function_rows import read_function

# Name -> function of the number of examples and the seed, which returns rows.
GENERATED: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {"calculator": calculator_examples}


def read_source(config: RunConfig) -> Examples:
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
