"""An environment that does in one step what it must not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from covey.config import EnvironmentConfig
from covey.control.envs.vector_env import Environments

NAME = "covey-faulty/Faulty-v0"
FINE = np.zeros(2, dtype=np.float32)


def answers(**changed: Any) -> tuple[Any, ...]:
    given = {"observation": FINE, "reward": 1.0, "terminated": False, "truncated": False, "info": {}} | changed
    return tuple(given.values())


def raises(error: BaseException) -> Any:
    raise error


class Faulty(gym.Env):
    """Fails in step `fails_at` of the episode that begins with reset(seed=7); step 0 is the reset itself."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: Any = None, fails_at: int = 2, seed: int = 7) -> None:
        self.fault, self.fails_at, self.fails_with = fault, fails_at, seed

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.bad, self.made = self.fault is not None and seed == self.fails_with, 0
        if self.bad and self.fails_at == 0:
            found = self.fault()
            return found[0] if isinstance(found, tuple) else found, {}
        return FINE, {}

    def step(self, action: int) -> Any:
        self.made += 1
        if self.bad and self.made == self.fails_at:
            return self.fault()
        return answers(truncated=self.made == 5)


@contextmanager
def registering() -> Iterator[Callable[..., EnvironmentConfig]]:
    """Context manager of a function that registers an environment under NAME until the end."""

    def do(entry: Any, **limits: Any) -> EnvironmentConfig:
        gym.register(NAME, entry, **limits)
        return EnvironmentConfig(id=NAME)

    try:
        yield do
    finally:
        gym.registry.pop(NAME, None)


def collect_episodes(environments: Environments, steps: int = 4) -> None:
    environments.reset([3, 7])
    for _ in range(steps):
        environments.step(np.zeros(2, dtype=np.int64))
