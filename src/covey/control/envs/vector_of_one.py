"""A vector environment of Gymnasium with one copy, as a single environment.

Rollouts need episodes that are determined by a reset seed each, which vector environments that reset their copies by
themselves do not have. So each copy of an environment that has only a vector class is a vector environment of its own.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from covey.control.envs.spaces import MASK

FINAL = "final_obs"  # key in the infos of a step, with AutoresetMode.SAME_STEP


class VectorOfOne(gym.Env):
    """The only copy of a vector environment. It is reset after every episode, so its own resets have no effect."""

    def __init__(self, vector: VectorEnv) -> None:
        if vector.num_envs != 1:
            raise ValueError(f"its vector class made {vector.num_envs} copies for num_envs = 1")
        self._vector = vector
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        self.metadata, self.render_mode = vector.metadata, vector.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self._vector.reset(seed=seed, options=options)
        return self._only(observations), _mask_of(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        empty: Any = create_empty_array(self.action_space, 1)
        actions = concatenate(self.action_space, [action], empty)
        observations, rewards, terminated, truncated, infos = self._vector.step(actions)
        final = infos.get(FINAL, [None])[0] if terminated[0] or truncated[0] else None
        observation = self._only(observations) if final is None else final
        return observation, rewards[0], terminated[0], truncated[0], _mask_of(infos)

    def render(self) -> Any:
        frames: Any = self._vector.render()
        return frames[0]

    def close(self) -> None:
        self._vector.close()

    def _only(self, observations: Any) -> Any:
        return next(iter(iterate(self._vector.observation_space, observations)))


def _mask_of(infos: dict[str, Any]) -> dict[str, Any]:
    return {MASK: np.asarray(infos[MASK])[0]} if MASK in infos else {}
