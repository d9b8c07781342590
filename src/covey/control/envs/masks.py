"""Action masks: which actions an environment allows in a state.

An environment gives its mask in one of these places, of which the first counts:

    observation["action_mask"]      of a Dict observation, as in PettingZoo and RLlib
    action_masks() or action_mask() a method, as in sb3-contrib
    info["action_mask"]             of reset and step, as in Gymnasium's Taxi-v4
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from covey.config import ConfigError
from covey.control.envs.spaces import MASK, Continuous, actions_of

OBSERVATION = "observation"  # the other key of a Dict observation, as in PettingZoo
METHODS = ("action_masks", "action_mask")

Reader = Callable[[Any, dict[str, Any]], Any]  # observation, info -> mask


class ActionMasks:
    """The masks of an environment, which `join` makes a part of its observations.

    Args:
        read: reads the mask.
        env: the environment.
        name: of the environment, for messages.

    Raises:
        ConfigError: if its actions are continuous, or its observation has a mask of another length.
    """

    def __init__(self, read: Reader, env: gym.Env, name: str) -> None:
        self._read = read
        actions = actions_of(env.action_space, name)
        if isinstance(actions, Continuous):
            raise ConfigError(
                f"environment {name!r} gives action masks, and its actions {env.action_space} are continuous: set "
                "environment.action_masks = false"
            )
        self._ends = list(accumulate(actions.counts))  # of the choices in a mask
        self._allowed: NDArray[np.int8] = np.ones(self._ends[-1], dtype=np.int8)
        seen = env.observation_space
        self._in_parts = isinstance(seen, spaces.Dict)
        parts = seen.spaces if isinstance(seen, spaces.Dict) else {OBSERVATION: seen}
        self.space = spaces.Dict({**parts, MASK: spaces.MultiBinary(self._ends[-1])})

    def join(self, observation: Any, info: dict[str, Any], *, over: bool) -> dict[str, Any]:
        """The observation with its mask. If the episode is over, every action is allowed, because none is taken.

        Raises:
            TypeError, ValueError: if the mask is not one 0 or 1 for every action, or if it allows no action.
        """
        mask = self._allowed if over else self._checked(self._read(observation, info))
        return {**(observation if self._in_parts else {OBSERVATION: observation}), MASK: mask}

    def _checked(self, mask: Any) -> NDArray[np.int8]:
        parts = mask if isinstance(mask, tuple | list) else (mask,)
        flat = np.concatenate([np.ravel(part) for part in parts]) if parts else np.empty(0)
        if flat.dtype.kind not in "biuf":
            raise TypeError(f"its action mask is {type(mask).__name__!r}, not an array of 0 and 1")
        if len(flat) != self._ends[-1]:
            raise ValueError(f"its action mask has {len(flat)} values, and its action space {self._ends[-1]} actions")
        allowed: NDArray[np.int8] = (flat != 0).astype(np.int8)
        if not np.array_equal(allowed, flat):
            raise ValueError("its action mask has a value other than 0 and 1")
        for choice, (begin, end) in enumerate(pairwise([0, *self._ends])):
            if not allowed[begin:end].any():
                of_several = f" of choice {choice}" if len(self._ends) > 1 else ""
                raise ValueError(f"its action mask allows no action{of_several}, and the episode is not over")
        return allowed


def has_mask(space: spaces.Space) -> bool:
    """True for a Dict observation with a mask."""
    return isinstance(space, spaces.Dict) and MASK in space.spaces


def find_reader(env: gym.Env) -> Reader | None:
    """The reader of an environment's masks; None if it gives none. The environment is reset if nothing else tells."""
    if has_mask(env.observation_space):
        return _in_observation
    for name in METHODS:
        if env.has_wrapper_attr(name) and _takes_nothing(env.get_wrapper_attr(name)):
            return partial(_by_method, env.get_wrapper_attr(name))
    try:
        _, info = env.reset(seed=0)
        return _in_info if MASK in info else None
    except Exception:  # the reset of the first episode reports it
        return None


def _in_observation(observation: Any, info: dict[str, Any]) -> Any:
    return observation[MASK]


def _in_info(observation: Any, info: dict[str, Any]) -> Any:
    if MASK not in info:
        raise ValueError(f"its info has no {MASK!r}, and that of its first reset had one")
    return info[MASK]


def _by_method(method: Callable[[], Any], observation: Any, info: dict[str, Any]) -> Any:
    return method()


def _takes_nothing(method: Any) -> bool:
    """True for a function that can be called without arguments; Taxi's `action_mask` needs a state."""
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True
