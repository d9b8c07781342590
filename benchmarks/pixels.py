"""An environment of pictures whose steps cost nearly nothing, so that a benchmark times the policy.

Read by each contestant in its own environment, so it needs NumPy and Gymnasium and nothing of covey.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Pixels(gym.Env):
    """84 x 84, four pictures: a bar at the height of the last action; the reward is 1 if it is at the top."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(0), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._draw(int(action)), float(action == 0), False, False, {}

    def _draw(self, height: int) -> Any:
        picture = np.zeros((84, 84, 4), np.uint8)
        picture[14 * height : 14 * height + 14] = 255
        return picture


gym.register("Pixels-v0", entry_point="pixels:Pixels", max_episode_steps=100)
