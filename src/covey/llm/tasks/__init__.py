"""Tasks of language models: sources of prompts with the data for their rewards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.config import ConfigError, RewardConfig
from covey.data import Task
from covey.llm.tasks.arithmetic import Arithmetic, Countdown, RunningTotal, WordProblems
from covey.llm.tasks.code_functions import CodeFunctions, HumanEval
from covey.llm.tasks.dataset import PromptDataset, Rows
from covey.llm.tasks.environment import EnvironmentRows, EnvironmentSeeds, GuessNumberTask, Lookup, MazeTask, Prompts
from covey.llm.tasks.reasoning_gym import ReasoningGym

__all__ = [
    "Arithmetic", "CodeFunctions", "Countdown", "EnvironmentRows", "EnvironmentSeeds", "GuessNumberTask", "HumanEval",
    "Lookup", "MazeTask", "PromptDataset", "Prompts", "ReasoningGym", "Rows", "RunningTotal", "WordProblems",
    "build_task", "default_rewards", "task_of",
]  # fmt: skip

_CLASSES: tuple[Any, ...] = (
    Arithmetic, Countdown, WordProblems, RunningTotal, CodeFunctions, GuessNumberTask, MazeTask, Lookup,
    EnvironmentSeeds, HumanEval, PromptDataset, ReasoningGym,
)  # fmt: skip
_TASKS = {task.config_type: task for task in _CLASSES}


def build_task(config: Any) -> Task:
    """Build the task of a config of `covey.config.TASK_CONFIGS`.

    Raises:
        ConfigError: if its fields are invalid, or its data cannot be read.
    """
    task: Task = _TASKS[type(config)](**vars(config))
    return task


def default_rewards(config: Any) -> tuple[RewardConfig, ...]:
    """The rewards of a run on this task if the recipe names none; the task is not built."""
    rewards: tuple[RewardConfig, ...] = _TASKS[type(config)].default_rewards
    return rewards


def task_of(given: Any) -> Task:
    """The task of a script, given as a `Task`, the config of one, the path of a data file, or rows.

    Raises:
        ConfigError: if it is none of these, or cannot be read.
    """
    if callable(getattr(given, "draw", None)) and callable(getattr(given, "held_out", None)):
        task: Task = given
        return task
    if type(given) in _TASKS:
        return build_task(given)
    if isinstance(given, str | Path):
        return PromptDataset(path=str(given))
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping):
        return Rows(given)
    raise ConfigError(
        f"task is of type {type(given).__name__}: give a list of dicts with a 'prompt', the path of a data file, a "
        "config such as ArithmeticConfig(), or an object with the methods draw and held_out"
    )
