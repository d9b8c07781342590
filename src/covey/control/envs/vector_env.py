"""Copies of a Gymnasium environment that step together; a copy whose episode is over ignores steps until it is reset.

So every episode has its own reset seed, and runs are reproducible (Gymnasium's `AutoresetMode.DISABLED`).

Shape legend: N slots (copies), D numbers in a flattened observation, A numbers in an action, K slots named in a call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from covey.config import ConfigError, EnvironmentConfig
from covey.control.action_spaces import ActionSpace, Discrete, MultiDiscrete
from covey.control.envs.cartpole import BatchedCartPole
from covey.control.envs.checked import EnvironmentFault, Watchdog
from covey.control.envs.manual_reset import (
    RAW_STEPS,
    ActionRepeat,
    AsyncWithDeadline,
    ManualResetVectorEnv,
    deepcopy_is_exact,
)
from covey.control.envs.registration import find_spec, refuse_broken
from covey.control.envs.spaces import SpaceAdapter

PROBED_STEPS = 1000  # random decisions within which an episode without a time limit must end
PROBED_SECONDS = 3.0
CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"


@dataclass(slots=True)
class Step:
    """Result of one step in every slot."""

    observation_ND: NDArray[np.float32]  # after the action; for a finished slot the last one of its episode
    reward_N: NDArray[np.float64]
    terminated_N: NDArray[np.bool_]
    truncated_N: NDArray[np.bool_]
    steps_N: NDArray[np.int64]  # raw environment steps of the decision; 0 for a finished slot


class Environments:
    """N copies of one environment, stepped together.

    Every episode begins from a seed passed to `reset` or `reset_slots`; a finished slot ignores steps until then.
    """

    def __init__(
        self, vector: VectorEnv, config: EnvironmentConfig, make_one: Callable[[], gym.Env] | None = None
    ) -> None:
        self._vector = vector
        self._name = config.id
        self._adapter = SpaceAdapter(vector.single_observation_space, vector.single_action_space, config.id)
        # Copies in processes have their own deadline.
        self._watchdog: AbstractContextManager[None] = nullcontext()
        if not isinstance(vector, AsyncWithDeadline | BatchedCartPole):
            self._watchdog = Watchdog(config.timeout_seconds, f"environment {config.id!r}")
        self._make_one = make_one
        self._snapshots: bool | None = None
        self._ended_N = np.ones(vector.num_envs, dtype=np.bool_)  # no episode has begun
        self.count: int = vector.num_envs
        self.observation_size: int = self._adapter.observation_size
        self.actions: ActionSpace = self._adapter.actions
        self.note: str = self._adapter.note  # a note on the observations for the user, or empty
        self.metadata: dict[str, Any] = dict(vector.metadata)  # Gymnasium's: render_modes, render_fps

    @property
    def snapshots(self) -> bool:
        """True if states can be copied exactly, which the first access tests on a separate copy."""
        if self._snapshots is None:
            self._snapshots = isinstance(self._vector, BatchedCartPole) or (
                isinstance(self._vector, ManualResetVectorEnv)
                and self._make_one is not None
                and deepcopy_is_exact(self._make_one)
            )
        return self._snapshots

    def reset(self, seeds: Sequence[int]) -> NDArray[np.float32]:
        """Begin an episode in every slot; returns their first observations [N, D]. Call it before all other methods."""
        numbers: Any = [int(seed) for seed in seeds]
        with self._watchdog:
            observations, _ = self._vector.reset(seed=numbers)
        self._ended_N[:] = False
        return self._finite(self._adapter.flatten(observations))

    def reset_slots(self, slots: NDArray[np.int64], seeds: Sequence[int]) -> NDArray[np.float32]:
        """Begin an episode in some slots, also in unfinished ones; returns their first observations [K, D]."""
        mask_N = np.zeros(self.count, dtype=np.bool_)
        mask_N[slots] = True
        seed_of: list[int | None] = [None] * self.count
        for slot, seed in zip(slots, seeds, strict=True):
            seed_of[slot] = int(seed)
        with self._watchdog:
            observations, _ = self._vector.reset(seed=seed_of, options={"reset_mask": mask_N})  # type: ignore[arg-type]
        self._ended_N[slots] = False
        return self._finite(self._adapter.flatten(observations))[slots]

    def step(self, actions: NDArray[Any]) -> Step:
        """Act in every slot: int64 [N], or float32 [N, A], which are clipped to the bounds of the action space.

        Finished slots ignore their action.
        """
        acted_N = ~self._ended_N
        with self._watchdog:
            observations, rewards, terminated_N, truncated_N, infos = self._vector.step(
                self._adapter.to_environment(actions)
            )
        observation_ND = self._finite(self._adapter.flatten(observations))
        self._ended_N |= terminated_N
        self._ended_N |= truncated_N
        return Step(
            observation_ND=observation_ND,
            reward_N=np.array(rewards, dtype=np.float64),
            terminated_N=terminated_N,
            truncated_N=truncated_N,
            steps_N=np.asarray(infos.get(RAW_STEPS, acted_N), dtype=np.int64),
        )

    def random_actions(self, position: int) -> NDArray[Any]:
        """An action for every slot, drawn uniformly (continuous: within the bounds, or from -1 to 1 without)."""
        generator = np.random.default_rng(position)
        actions = self.actions
        if isinstance(actions, Discrete):
            return generator.integers(actions.count, size=self.count)
        if isinstance(actions, MultiDiscrete):
            return generator.integers(actions.counts, size=(self.count, actions.size))
        bounded_A = np.isfinite(actions.low_A) & np.isfinite(actions.high_A)
        low_A, high_A = np.where(bounded_A, actions.low_A, -1.0), np.where(bounded_A, actions.high_A, 1.0)
        return generator.uniform(low_A, high_A, size=(self.count, actions.size)).astype(np.float32)

    def snapshot(self, slot: int) -> Any:
        """The state of a slot with its generator, for any number of calls of `restore`.

        Raises:
            RuntimeError: if states cannot be copied (`snapshots` is False).
        """
        if not self.snapshots:
            raise RuntimeError("the state of this environment cannot be copied")
        return bool(self._ended_N[slot]), self._vector.snapshot(slot)  # type: ignore[attr-defined]

    def restore(self, slot: int, snapshot: Any) -> NDArray[np.float32]:
        """Restore a snapshot of any slot in any slot; returns its observation [D]."""
        self._ended_N[slot], state = snapshot
        return self._adapter.flatten_one(self._vector.restore(slot, state))  # type: ignore[attr-defined]

    def render(self) -> NDArray[np.uint8]:
        """A picture [height, width, 3] of the first slot; needs `render_mode` in `make_environments`."""
        frames = self._vector.render()
        assert frames is not None
        return np.asarray(frames[0], dtype=np.uint8)

    def close(self) -> None:
        """Close the copies and their processes."""
        self._vector.close()

    def _finite(self, observation_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Check that observations are finite; returns them.

        Raises:
            EnvironmentFault: if a number in them is NaN or infinite.
        """
        if np.isfinite(observation_ND).all():
            return observation_ND
        slot, number = (int(index) for index in np.argwhere(~np.isfinite(observation_ND))[0])
        place = f"environment {self._name!r}, copy {slot}"
        if isinstance(self._vector, SyncVectorEnv | AsyncVectorEnv):
            place = self._vector.get_attr("place")[slot]
        raise EnvironmentFault(f"{place}: number {number} of its observation is {observation_ND[slot, number]}")


def make_environments(config: EnvironmentConfig, count: int, *, render_mode: str | None = None) -> Environments:
    """Create `count` copies of the environment in the config.

    Raises:
        ConfigError: for an unknown id, a missing package, unsupported spaces, or a combination of settings that the
            environment does not support.
    """
    spec = find_spec(config.id)
    if spec.entry_point is None:
        raise ConfigError(f"{config.id!r} has only a vector class: choose an environment with a class of its own")
    with refuse_broken(config.id):
        if config.vectorization == "auto" and render_mode is None and _is_plain_cartpole(config, spec):
            limit = config.max_episode_steps or spec.max_episode_steps
            assert limit is not None
            return Environments(BatchedCartPole(count, limit), config)
        make_one = partial(_make_one, config, spec, render_mode)
        SpaceAdapter(*_spaces(make_one), config.id)  # refuses spaces before processes are started
        kind: Any = ManualResetVectorEnv
        if config.vectorization == "async":
            kind = partial(AsyncWithDeadline, name=config.id, timeout_seconds=config.timeout_seconds)
        return Environments(kind([make_one] * count, autoreset_mode=AutoresetMode.DISABLED), config, make_one)


def longest_episode(config: EnvironmentConfig) -> int | None:
    """Decisions after which the time limit ends an episode; None if neither config nor registration has one.

    Raises:
        ConfigError: for an unknown id.
    """
    raw_steps = config.max_episode_steps or find_spec(config.id).max_episode_steps
    return None if raw_steps is None else math.ceil(raw_steps / config.action_repeat)


def check_environment(config: EnvironmentConfig) -> None:
    """Test an environment by random actions in one copy, and refuse one that cannot be used.

    Raises:
        ConfigError: as `make_environments`; for an environment that raises or returns invalid values, and for one
            without a time limit of which no episode ends in `PROBED_STEPS`.
    """
    in_process = replace(config, vectorization="sync") if config.vectorization == "async" else config
    environments = make_environments(in_process, 1)
    endless = longest_episode(config) is None
    until = time.monotonic() + PROBED_SECONDS
    try:
        environments.reset([0])
        for made in range(PROBED_STEPS if endless else PROBED_STEPS // 50):
            step = environments.step(environments.random_actions(made))
            ended = bool(step.terminated_N[0] or step.truncated_N[0])
            if ended or time.monotonic() > until:
                break
    except EnvironmentFault as error:
        raise ConfigError(str(error)) from error
    finally:
        environments.close()
    if endless and not ended:
        raise ConfigError(
            f"environment.id: {config.id!r} has no time limit, and none of its episodes ended in {made + 1:,} random "
            "steps: set environment.max_episode_steps"
        )


def _make_one(config: EnvironmentConfig, spec: gym.envs.registration.EnvSpec, render_mode: str | None) -> ActionRepeat:
    """Create one copy for a sync or async vector environment."""
    options: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    limit = config.max_episode_steps or None
    env = gym.make(spec, max_episode_steps=limit, disable_env_checker=True, **options)  # `ActionRepeat` checks more
    return ActionRepeat(env, config.action_repeat, config.id)


def _spaces(make_one: Callable[[], gym.Env]) -> tuple[gym.Space, gym.Space]:
    env = make_one()
    try:
        return env.observation_space, env.action_space
    finally:
        env.close()


def _is_plain_cartpole(config: EnvironmentConfig, spec: gym.envs.registration.EnvSpec) -> bool:
    """True if BatchedCartPole implements these settings exactly."""
    plain = spec.entry_point == CARTPOLE and not spec.kwargs and not spec.additional_wrappers
    return plain and config.action_repeat == 1
