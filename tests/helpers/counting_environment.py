"""Environments whose observations say which episode and which step they belong to."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

COUNTING = "covey-tests/Counting-v0"
PUSHED = "covey-tests/Pushed-v0"


class Counting(gym.Env):
    """Observes (name of the episode, its length, steps made), pays the number of the step; ends after its length.

    Name and length are drawn at the reset, so an episode is named by its seed. Actions are 5, 6 and 7; 7 pays 100 more.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3, start=5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.name, self.length = int(self.np_random.integers(1_000_000)), int(self.np_random.integers(2, 7))
        self.made = 0
        return self._observation(), {"odd": np.zeros(self.length)}  # infos of different shapes cannot be merged

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        assert self.made < self.length, "stepped after its end"
        self.made += 1
        reward = float(self.made + 100 * (action == 7))
        return self._observation(), reward, self.made == self.length, False, {"odd": np.zeros(self.length)}

    def _observation(self) -> Any:
        return np.array([self.name, self.length, self.made], dtype=np.float32)


class Pushed(gym.Env):
    """Continuous actions [2, 2]; pays their sum, observes a dict, never ends."""

    observation_space = spaces.Dict(position=spaces.Box(-9.0, 9.0, (2, 2), np.float64), gear=spaces.Discrete(3))
    action_space = spaces.Box(np.array([[-1, -1], [-2, -2]]), np.array([[1, 1], [2, 2]]), (2, 2), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return {"position": np.arange(4.0).reshape(2, 2), "gear": 1}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return {"position": action, "gear": 2}, float(action.sum()), False, False, {}


def register() -> None:
    """Make the environments known under their ids; harmless when repeated."""
    if COUNTING not in gym.registry:
        gym.register(COUNTING, entry_point=Counting)
        gym.register(PUSHED, entry_point=Pushed)
        cartpole = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
        gym.register("covey-tests/OnlyVector-v0", vector_entry_point=cartpole, max_episode_steps=20)
        gym.register("covey-tests/NoVector-v0", vector_entry_point=lambda num_envs: None)
