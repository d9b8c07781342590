"""What every implementation of a Protocol promises, as classes of tests; a test file subclasses one for its own."""

import json
import random
from typing import Any

import pytest

from covey.data import Start


def problem(start: Start) -> str:
    """What tells a problem from another one."""
    return json.dumps([start.prompt, start.columns], sort_keys=True, default=str)


class TaskContract:
    """A subclass has the fixture `task`, and `held_out` problems of it are asked for."""

    held_out = 8

    @pytest.mark.parametrize(("seed", "step", "count"), [(0, 1, 1), (3, 5, 6), (2**32 - 2, 10**6, 12)])
    def test_a_draw_depends_on_its_arguments_alone(self, task: Any, seed: int, step: int, count: int) -> None:
        random.seed(count)
        first = task.draw(seed, step, count + 3)
        random.seed(step)
        task.held_out(3)
        task.draw(seed + 1, step, 2)
        assert task.draw(seed, step, count) == first[:count]
        assert task.draw(seed, step, 3, first=count, before=91) == first[count:]
        assert [start.index for start in first] == list(range(count + 3))

    def test_draws_differ_between_seeds_and_steps(self, task: Any) -> None:
        draws = [tuple(map(problem, task.draw(seed, step, 16))) for seed in range(3) for step in range(1, 4)]
        assert len(set(draws)) == 9

    def test_training_never_sees_a_held_out_problem(self, task: Any) -> None:
        held_out = [problem(start) for start in task.held_out(self.held_out)]
        assert len(set(held_out)) == self.held_out
        assert not set(held_out) & {problem(start) for step in range(1, 20) for start in task.draw(0, step, 10)}
        assert [problem(start) for start in task.held_out(3)] == held_out[:3]
