"""The tasks of the built-in environments."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from covey.config import ConfigError
from covey.llm.tasks import GuessNumberTask, Lookup, MazeTask

TASKS: list[Any] = [GuessNumberTask(), MazeTask(), Lookup()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_draws_depend_on_their_arguments_alone_and_never_meet_held_out_problems(task: Any) -> None:
    first = task.draw(3, 5, 6)
    random.seed(7)
    assert task.draw(3, 5, 3, first=3) == first[3:]
    assert task.draw(3, 6, 6) != first
    held_out = {json.dumps(start.columns) for start in task.held_out(8)}
    assert len(held_out) == 8
    assert not held_out & {json.dumps(start.columns) for step in range(20) for start in task.draw(0, step, 10)}


@pytest.mark.slow
def test_a_maze_that_cannot_be_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set task\.moves to twice the size"):
        MazeTask(size=8, moves=5)
    with pytest.raises(ConfigError, match="make the task larger"):
        GuessNumberTask(highest=28).held_out(1)
