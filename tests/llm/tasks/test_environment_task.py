"""Tasks of environments: seeds, or the prompts that an environment brings."""

import pytest

from covey.config import ConfigError, EnvironmentTaskConfig
from covey.llm.tasks import EnvironmentRows, EnvironmentSeeds, GuessNumberTask, MazeTask
from covey.llm.tasks.environment import TRAINING_SEEDS

ROWS = [{"prompt": f"p{number}", "number": number} for number in range(20)]


def test_seeds_of_training_are_different_and_never_held_out() -> None:
    task = EnvironmentSeeds(instruction="Go")
    seeds = [start.columns["seed"] for step in range(50) for start in task.draw(0, step, 10)]
    assert len(set(seeds)) == 500
    assert all(0 <= seed < TRAINING_SEEDS for seed in seeds)
    assert [start.columns["seed"] for start in task.held_out(3)] == [TRAINING_SEEDS + number for number in range(3)]
    assert task.draw(3, 5, 1)[0].prompt == [{"role": "user", "content": "Go"}]
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
    with pytest.raises(ConfigError, match="so none is left for training"):
        EnvironmentRows({"training": ROWS[:2], "held_out": ROWS}, config, "it")
    with pytest.raises(ConfigError, match="it has only one prompt"):
        EnvironmentRows({"training": ROWS[:1], "held_out": []}, config, "it")


@pytest.mark.slow
def test_a_maze_that_cannot_be_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set task\.moves to twice the size"):
        MazeTask(size=8, moves=5)
    with pytest.raises(ConfigError, match="make the task larger"):
        GuessNumberTask(highest=28).held_out(1)
