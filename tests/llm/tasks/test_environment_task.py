"""The task `environment`: seeds, or the prompts that an environment brings."""

from __future__ import annotations

import random

import pytest

from covey.config import ConfigError, EnvironmentTaskConfig
from covey.llm.tasks import EnvironmentRows, EnvironmentSeeds
from covey.llm.tasks.environment import TRAINING_SEEDS

ROWS = [{"prompt": f"p{number}", "number": number} for number in range(20)]


def test_seeds_depend_on_the_arguments_of_a_draw_alone_and_are_never_held_out() -> None:
    task = EnvironmentSeeds(instruction="Go")
    first = task.draw(3, 5, 6)
    random.seed(7)
    assert task.draw(3, 5, 3, first=3) == first[3:]
    seeds = [start.columns["seed"] for step in range(50) for start in task.draw(0, step, 10)]
    assert len(set(seeds)) == 500
    assert all(0 <= seed < TRAINING_SEEDS for seed in seeds)
    assert [start.columns["seed"] for start in task.held_out(3)] == [TRAINING_SEEDS + number for number in range(3)]
    assert first[0].prompt == [{"role": "user", "content": "Go"}]
    assert task.default_rewards == ()


def test_a_part_of_the_prompts_is_held_out_if_the_environment_has_none() -> None:
    task = EnvironmentRows({"training": ROWS, "held_out": []}, EnvironmentTaskConfig(held_out_fraction=0.2), "it")
    held_out = {start.columns["number"] for start in task.held_out(100)}
    assert len(held_out) == 4
    assert {start.columns["number"] for start in task.draw(0, 1, 16)} == set(range(20)) - held_out
    assert task.describe() == "it: 16 different prompts to train on, 4 held out (task.held_out_fraction = 0.2)"


def test_prompts_that_cannot_be_used_are_refused() -> None:
    config = EnvironmentTaskConfig()
    with pytest.raises(ConfigError, match="it, held-out row 1: there is no 'prompt'"):
        EnvironmentRows({"training": ROWS, "held_out": [ROWS[0], {"number": 3}]}, config, "it")
    with pytest.raises(ConfigError, match="it has no prompt for training that is not held out"):
        EnvironmentRows({"training": ROWS[:2], "held_out": ROWS}, config, "it")
    with pytest.raises(ConfigError, match="it has only one prompt"):
        EnvironmentRows({"training": ROWS[:1], "held_out": []}, config, "it")
