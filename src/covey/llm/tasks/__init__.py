"""The tasks of the language-model world: where prompts come from and what is known of their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.config import ArithmeticConfig, CountdownConfig, JsonlConfig, RunningTotalConfig, WordProblemsConfig
from covey.data import Task
from covey.llm.tasks.arithmetic import Arithmetic
from covey.llm.tasks.countdown import Countdown
from covey.llm.tasks.jsonl import Jsonl
from covey.llm.tasks.running_total import RunningTotal
from covey.llm.tasks.word_problems import WordProblems

__all__ = ["Arithmetic", "Countdown", "Jsonl", "RunningTotal", "WordProblems", "build_task"]

_TASKS: dict[type, Callable[..., Task]] = {
    ArithmeticConfig: Arithmetic,
    CountdownConfig: Countdown,
    WordProblemsConfig: WordProblems,
    RunningTotalConfig: RunningTotal,
    JsonlConfig: Jsonl,
}


def build_task(config: Any) -> Task:
    """The task that a config object of `covey.config.TASK_CONFIGS` describes.

    Raises:
        ConfigError: if its fields are impossible, or its data cannot be read.
    """
    return _TASKS[type(config)](**vars(config))
