"""Converts between an environment's spaces and the plain arrays of policies.

Shape legend: N slots (copies), D numbers in a flattened observation, A numbers in an action.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from covey.config import ConfigError

MOST_NUMBERS = 10_000_000  # limit of an observation, with which a first layer of 64 takes 2.5 GB
MOST_ACTIONS = 1_000_000
MASK = "action_mask"  # key of a Dict observation


class SpaceAdapter:
    """Flattens observations to float32 (bytes and booleans to uint8), numbers discrete actions from 0, clips and
    reshapes continuous ones.

    A Box of any shape is flattened, a Discrete observation becomes one-hot; the parts of a Dict or a Tuple are
    concatenated in the order of Gymnasium's `flatten`. With `masked`, the mask of a Dict (V numbers, 1 for an action
    that is allowed) is not one of the D numbers, but follows them.

    Raises:
        ConfigError: for unsupported spaces.
    """

    def __init__(self, observation_space: Space, action_space: Space, where: str, *, masked: bool = False) -> None:
        self.masked = masked
        if masked:
            rest = {name: part for name, part in observation_space.spaces.items() if name != MASK}  # type: ignore[attr-defined]
            self._only = next(iter(rest)) if len(rest) == 1 else None
            observation_space = spaces.Dict(rest) if self._only is None else rest[self._only]
        if not _is_numeric(observation_space):
            raise ConfigError(
                f"environment {where!r} observes {observation_space}: a policy here takes Box, Discrete, "
                "MultiDiscrete, MultiBinary, and a Dict or Tuple of them, so wrap it "
                "(gymnasium.wrappers.FilterObservation leaves parts of a Dict out)"
            )
        self.observed: Space = observation_space  # without the mask
        self._is_box = isinstance(observation_space, spaces.Box)
        self.observation_size = int(spaces.flatdim(observation_space))
        if not 0 < self.observation_size <= MOST_NUMBERS:
            raise ConfigError(
                f"environment {where!r} observes {self.observation_size:,} numbers: a policy takes 1 to "
                f"{MOST_NUMBERS:,}, so wrap it to observe fewer"
            )
        # Bytes stay bytes, which the buffer of rollouts stores in a quarter of the memory.
        bytes_alone = self._is_box and observation_space.dtype in (np.uint8, np.bool_)
        self._row_dtype: type = np.uint8 if bytes_alone else np.float32
        self.actions: ActionSpace = actions_of(action_space, where)
        self._first: Any = getattr(action_space, "start", 0)
        self._shape: tuple[int, ...] = action_space.shape or ()
        self._dtype = action_space.dtype

    def flatten(self, observations: Any) -> NDArray[np.float32]:
        """A vector environment's batch of observations -> [N, D], or [N, D + V] with masks."""
        rest, mask_NV = self._parted(observations)
        if self._is_box:
            # A copy, because vector environments may reuse the array in their next step.
            row_ND: NDArray[Any] = np.array(rest, dtype=self._row_dtype).reshape(len(rest), -1)
        else:
            batched = batch_space(self.observed, len(next(iter(_leaves(rest)))))
            row_ND = np.stack([self._flat(single) for single in iterate(batched, rest)])
        return row_ND if mask_NV is None else np.concatenate([row_ND, mask_NV.astype(row_ND.dtype)], axis=1)

    def flatten_one(self, observation: Any) -> NDArray[np.float32]:
        """A single environment's observation -> [D], or [D + V] with masks."""
        rest, mask_V = self._parted(observation)
        row_D = self._flat(rest)
        return row_D if mask_V is None else np.concatenate([row_D, mask_V.astype(row_D.dtype)])

    def _parted(self, observation: Any) -> tuple[Any, Any]:
        """The observation without its mask, and the mask; None: there is none."""
        if not self.masked:
            return observation, None
        if self._only is not None:
            return observation[self._only], observation[MASK]
        return {name: part for name, part in observation.items() if name != MASK}, observation[MASK]

    def _flat(self, observation: Any) -> NDArray[np.float32]:
        return np.asarray(spaces.flatten(self.observed, observation), dtype=self._row_dtype)

    def random_actions(self, generator: np.random.Generator, row_NW: NDArray[Any]) -> NDArray[Any]:
        """An action for each of N rows of `flatten`, drawn uniformly from those that its mask allows (continuous:
        within the bounds, or from -1 to 1 without).
        """
        count, actions = len(row_NW), self.actions
        if isinstance(actions, Continuous):
            bounded_A = np.isfinite(actions.low_A) & np.isfinite(actions.high_A)
            low_A, high_A = np.where(bounded_A, actions.low_A, -1.0), np.where(bounded_A, actions.high_A, 1.0)
            return generator.uniform(low_A, high_A, size=(count, actions.size)).astype(np.float32)
        if not self.masked:
            drawn_NA = generator.integers(actions.counts, size=(count, actions.size))
        else:
            lot_NV = generator.random((count, actions.outputs)) + row_NW[:, self.observation_size :]
            lots = np.split(lot_NV, np.cumsum(actions.counts)[:-1], axis=1)
            drawn_NA = np.stack([lot_NC.argmax(axis=1) for lot_NC in lots], axis=1)
        return drawn_NA[:, 0] if isinstance(actions, Discrete) else drawn_NA

    def to_environment(self, actions: NDArray[Any]) -> NDArray[Any]:
        """A policy's actions (int64 [N] or [N, A], or float32 [N, A]) -> the vector environment's actions."""
        if isinstance(self.actions, Discrete):
            return actions + int(self._first) if self._first else actions
        if isinstance(self.actions, MultiDiscrete):
            return (actions.reshape(len(actions), *self._shape) + self._first).astype(self._dtype, copy=False)
        clipped = np.clip(actions, self.actions.low_A, self.actions.high_A)
        return clipped.astype(self._dtype, copy=False).reshape(len(actions), *self._shape)


def _is_numeric(space: Space) -> bool:
    """True for a space with a fixed number of numbers; a text is not numeric."""
    if isinstance(space, spaces.Dict):
        return all(map(_is_numeric, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_is_numeric, space.spaces))
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def _leaves(observations: Any) -> Any:
    """The arrays of a batched observation; each has one row per slot."""
    if isinstance(observations, dict):
        observations = tuple(observations.values())
    if isinstance(observations, tuple):
        for part in observations:
            yield from _leaves(part)
    else:
        yield observations


@dataclass(frozen=True)
class Discrete:
    """One of `count` actions, numbered from 0."""

    count: int
    size = 1  # numbers in an action

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of actions of its one choice."""
        return (self.count,)

    @property
    def outputs(self) -> int:
        """Outputs of the policy's network: one logit per action."""
        return self.count

    @property
    def entropy_range(self) -> tuple[float, float]:
        """Lowest and highest entropy of a policy, in nats."""
        return 0.0, math.log(self.count)


@dataclass(frozen=True)
class MultiDiscrete:
    """A choices, independent given the observation; choice i is one of `counts[i]` actions."""

    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """A."""
        return len(self.counts)

    @property
    def outputs(self) -> int:
        """Outputs of the policy's network: the concatenated logits of all choices."""
        return sum(self.counts)

    @property
    def entropy_range(self) -> tuple[float, float]:
        """Lowest and highest entropy of a policy, in nats."""
        return 0.0, sum(map(math.log, self.counts))


@dataclass(frozen=True, eq=False)
class Continuous:
    """A vector of A unbounded numbers, which are clipped to the environment's bounds."""

    low_A: NDArray[np.float32]
    high_A: NDArray[np.float32]

    @property
    def size(self) -> int:
        """A."""
        return len(self.low_A)

    @property
    def outputs(self) -> int:
        """Outputs of the policy's network: the means of a Gaussian."""
        return len(self.low_A)

    @property
    def entropy_range(self) -> tuple[float, float]:
        """Lowest and highest entropy of a policy, in nats: a density has no limits."""
        return -math.inf, math.inf


ActionSpace = Discrete | MultiDiscrete | Continuous


def actions_of(space: Space, where: str) -> ActionSpace:
    """The actions of an environment's space.

    Raises:
        ConfigError: for an unsupported space.
    """
    actions: ActionSpace
    if isinstance(space, spaces.Discrete):
        actions = Discrete(int(space.n))
    elif isinstance(space, spaces.MultiDiscrete):
        actions = MultiDiscrete(tuple(int(count) for count in space.nvec.reshape(-1)))
    elif isinstance(space, spaces.MultiBinary):
        actions = MultiDiscrete((2,) * int(np.prod(space.shape)))
    elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        actions = Continuous(space.low.reshape(-1).astype(np.float32), space.high.reshape(-1).astype(np.float32))
    else:
        raise ConfigError(
            f"environment {where!r} acts in {space}: a policy here makes one choice (Discrete), several "
            "(MultiDiscrete, MultiBinary) or gives a vector of floats (Box), so wrap it to take one of these"
        )
    if not 0 < actions.outputs <= MOST_ACTIONS:
        raise ConfigError(
            f"environment {where!r} has {actions.outputs:,} actions: a policy chooses among 1 to {MOST_ACTIONS:,}, so "
            "wrap it to offer fewer"
        )
    return actions
