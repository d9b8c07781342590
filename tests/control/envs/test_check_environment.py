"""What `covey check` says of an environment before the first episode."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from covey.config import ConfigError, ControlConfig
from covey.config.recipe import config_from_dict
from covey.control.envs.vector_env import check_environment
from covey.experiment.run import check
from helpers.faulty_environments import FINE, NAME, Faulty, answers, registering


@pytest.fixture
def register():
    with registering() as do:
        yield do


class Seeded(Faulty):
    """Starts and steps with numbers of a generator."""

    def generator(self) -> Any:
        return self.np_random

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.generator().random(2).astype(np.float32), {}

    def step(self, action: int) -> Any:
        _, *rest = super().step(action)
        return self.generator().random(2).astype(np.float32), *rest


class OfTheModule(Seeded):
    def generator(self) -> Any:
        return random


class Unseeded(Seeded):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None)


class LateChance(Seeded):
    def step(self, action: int) -> Any:
        self._np_random = np.random.default_rng()
        return super().step(action)


class Grows(Faulty):
    level = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.level += 1
        super().reset(seed=seed)
        return FINE + self.level, {}


random = np.random.RandomState(5)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Seeded, ""),
        (OfTheModule, "reset(seed=0) began two episodes with different observations"),
        (Unseeded, "reset(seed=0) began two episodes with different observations"),
        (LateChance, "step 1 of two episodes with the same reset(seed=0) and actions had different results"),
        (Grows, "reset(seed=0) began two episodes with different observations"),
    ],
)
def test_an_environment_that_ignores_its_seed_is_named(kind, said, register):
    notes = check_environment(register(kind, max_episode_steps=9))
    assert [said] * len(notes) == [note[len(f"environment '{NAME}': ") :].partition(", so")[0] for note in notes]
    assert bool(notes) == bool(said)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("low", "high", "named"),
    [(0, 1000, True), (-0.01, 0.01, True), (90, 100, True), (-1, 1, False), (0, 1, False), (-np.inf, np.inf, False)],
)
def test_a_range_of_actions_that_the_policy_does_not_explore_is_named_with_the_wrapper(low, high, named, register):
    register(type("Ranged", (Faulty,), {"action_space": spaces.Box(low, high, (2,), np.float32)}), max_episode_steps=9)
    config = config_from_dict({"environment": {"id": NAME}})
    assert isinstance(config, ControlConfig)
    notes = check(config)
    assert len(notes) == named
    assert all(
        f"takes actions from {low:g} to {high:g}" in note and "gymnasium.wrappers.RescaleAction" in note
        for note in notes
    )


def test_episodes_that_nothing_must_end_are_named_with_the_field(register):
    class Ends(Faulty):
        def step(self, action: int) -> Any:
            self.made += 1
            return answers(terminated=self.made == 9)

    (note,) = check_environment(register(Ends))
    assert "has no time limit, and a trained policy may never end an episode: set environment.max_episode_steps" in note
    gym.registry.pop(NAME)
    with pytest.raises(ConfigError, match="has a time limit of 1,000,000,000 decisions, and none of its episodes"):
        check_environment(register(Moving, max_episode_steps=10**9))


class Moving(Faulty):
    def step(self, action: int) -> Any:
        return answers()
