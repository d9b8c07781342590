"""Between an environment's own spaces and the plain arrays that policies see.

Shape legend: N slots (copies), D numbers in a flattened observation, A numbers in an action.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from covey.config import ConfigError
from covey.control.spaces import ActionSpace, Continuous, Discrete


class Translation:
    """Flattens observations to float32, numbers discrete actions from 0, clips and shapes continuous ones.

    A Box of any shape is flattened, a Discrete observation becomes one-hot, other spaces go through Gymnasium's
    `flatten`.

    Raises:
        ConfigError: for spaces that this cannot do.
    """

    def __init__(self, observation_space: Space, action_space: Space, where: str) -> None:
        if not observation_space.is_np_flattenable:
            raise ConfigError(
                f"environment {where!r} observes {observation_space}, which has no fixed number of values: "
                "wrap it so that it observes a Box"
            )
        self._observation_space = observation_space
        self._is_box = isinstance(observation_space, spaces.Box)
        self.observation_size = int(spaces.flatdim(observation_space))
        self.actions: ActionSpace
        if isinstance(action_space, spaces.Discrete):
            self.actions = Discrete(int(action_space.n))
            self._first = int(action_space.start)
        elif isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating):
            self.actions = Continuous(
                action_space.low.reshape(-1).astype(np.float32), action_space.high.reshape(-1).astype(np.float32)
            )
            self._shape, self._dtype = action_space.shape, action_space.dtype
        else:
            raise ConfigError(
                f"environment {where!r} acts in {action_space}: a policy here makes one choice (Discrete) or gives "
                "a vector of floats (Box), so wrap it to take one of these"
            )

    def flatten(self, observations: Any) -> NDArray[np.float32]:
        """A batch of observations as the vector environment gives it -> [N, D]."""
        if self._is_box:
            # A copy, because vector classes may fill the same array again in their next step.
            return np.array(observations, dtype=np.float32).reshape(len(observations), -1)
        count = len(next(iter(_leaves(observations))))
        batched = batch_space(self._observation_space, count)
        return np.stack([self.flatten_one(single) for single in iterate(batched, observations)])

    def flatten_one(self, observation: Any) -> NDArray[np.float32]:
        """One observation as a single environment gives it -> [D]."""
        return np.asarray(spaces.flatten(self._observation_space, observation), dtype=np.float32)

    def to_environment(self, actions: NDArray[Any]) -> NDArray[Any]:
        """A policy's actions (int64 [N] or float32 [N, A]) -> what the vector environment takes."""
        if isinstance(self.actions, Discrete):
            return actions + self._first if self._first else actions
        clipped = np.clip(actions, self.actions.low_A, self.actions.high_A)
        return clipped.astype(self._dtype, copy=False).reshape(len(actions), *self._shape)


def _leaves(observations: Any) -> Any:
    """The arrays of a batched observation; each has one row per slot."""
    if isinstance(observations, dict):
        observations = tuple(observations.values())
    if isinstance(observations, tuple):
        for part in observations:
            yield from _leaves(part)
    else:
        yield observations
