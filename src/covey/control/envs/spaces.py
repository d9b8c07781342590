"""Converts between an environment's spaces and the plain arrays of policies; finds its action masks.

Shape legend: N slots (copies), D numbers in a flattened observation, A numbers in an action.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import gymnasium as gym
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
        self._acted: Any = action_space

    def flatten(self, observations: Any) -> NDArray[np.float32]:
        """A vector environment's batch of observations -> [N, D], or [N, D + V] with masks."""
        rest, mask_NV = self._parted(observations)
        if self._is_box:
            # A copy, because vector environments may reuse the array in their next step.
            row_ND: NDArray[Any] = np.array(rest, dtype=self._row_dtype).reshape(len(rest), -1)
        elif isinstance(self.observed, spaces.Discrete):
            row_ND = np.zeros((len(rest), self.observation_size), dtype=self._row_dtype)
            row_ND[np.arange(len(rest)), rest - self.observed.start] = 1
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
            return (actions.reshape(len(actions), *self._shape) + self._first).astype(self._acted.dtype, copy=False)
        # In the numbers of the space: a bound of 0.1 in float64 is another number in float32.
        numbers = actions.reshape(len(actions), *self._shape).astype(self._acted.dtype, copy=False)
        clipped: NDArray[Any] = np.clip(numbers, self._acted.low, self._acted.high)
        return clipped


def _is_numeric(space: Space) -> bool:
    """True for a space with a fixed number of numbers; a text is not numeric."""
    if isinstance(space, spaces.Dict):
        return all(map(_is_numeric, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_is_numeric, space.spaces))
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def numeric_parts(env: gym.Env) -> tuple[gym.Env, tuple[str, ...]]:
    """The environment without the parts of its Dict observation that are not numbers, such as MiniGrid's mission, and
    their names; an observation of no numbers stays as it is.
    """
    parts = env.observation_space.spaces if isinstance(env.observation_space, spaces.Dict) else {}
    kept = [name for name, part in parts.items() if _is_numeric(part)]
    if not 0 < len(kept) < len(parts):
        return env, ()
    return gym.wrappers.FilterObservation(env, kept), tuple(name for name in parts if name not in kept)


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


# ---- action masks ----

# An environment gives its mask in one of these places, of which the first counts:
#
#     observation["action_mask"]      of a Dict observation, as in PettingZoo and RLlib
#     action_masks() or action_mask() a method, as in sb3-contrib
#     info["action_mask"]             of reset and step, as in Gymnasium's Taxi-v4

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
        if isinstance(mask, np.ndarray):
            flat = mask.reshape(-1)
        else:
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
