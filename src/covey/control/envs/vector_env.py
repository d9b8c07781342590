"""Copies of a Gymnasium environment that step together; a copy whose episode is over ignores steps until it is reset.

So every episode has its own reset seed, and runs are reproducible (Gymnasium's `AutoresetMode.DISABLED`).

Shape legend: N slots (copies), D numbers in a flattened observation (with its action mask, if there is one), A numbers
in an action, K slots named in a call.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from covey.config import ConfigError, EnvironmentConfig
from covey.config.machine import may_fork
from covey.control.envs.batched import BATCHED, BatchedEnv
from covey.control.envs.checked import EnvironmentFault, Watchdog
from covey.control.envs.isolated import IsolatedVectorEnv
from covey.control.envs.manual_reset import (
    FAILED,
    RAW_STEPS,
    ActionRepeat,
    AsyncWithDeadline,
    ManualResetVectorEnv,
    copies_are_exact,
)
from covey.control.envs.registration import find_spec, refuse_broken
from covey.control.envs.spaces import MASK, ActionMasks, ActionSpace, SpaceAdapter, find_reader, has_mask, numeric_parts
from covey.control.pictures import Picture

# ---- an environment that has only a vector class ----

# Rollouts need episodes that are determined by a reset seed each, which vector environments that reset their copies by
# themselves do not have. So each copy of such an environment is a vector environment with one copy.

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


PROBED_STEPS = 1000  # random decisions within which an episode without a time limit must end
PROBED_SECONDS = 3.0
LONGEST_WAIT = 100_000  # decisions after which an episode is refused as endless
OF_GYMNASIUM = "gymnasium.envs."  # beginning of the entry points of Gymnasium's own environments


@dataclass(slots=True)
class Step:
    """Result of one step in every slot."""

    observation_ND: NDArray[np.float32]  # after the action; for a finished slot the last one of its episode
    reward_N: NDArray[np.float64]
    terminated_N: NDArray[np.bool_]
    truncated_N: NDArray[np.bool_]
    steps_N: NDArray[np.int64]  # raw environment steps of the decision; 0 for a finished slot
    failed_N: NDArray[np.bool_] | None = None  # True if the environment failed, which truncated its episode; None: no


class Environments:
    """N copies of one environment, stepped together.

    Every episode begins from a seed passed to `reset` or `reset_slots`; a finished slot ignores steps until then.
    """

    def __init__(
        self, vector: VectorEnv, config: EnvironmentConfig, make_one: Callable[[], gym.Env] | None = None
    ) -> None:
        self._vector = vector
        self._name = config.id
        seen = vector.single_observation_space
        self.masked: bool = config.action_masks and has_mask(seen)  # a mask of V actions follows the observation
        self._adapter = SpaceAdapter(seen, vector.single_action_space, config.id, masked=self.masked)
        self._row_ND: NDArray[np.float32] = np.empty(0, dtype=np.float32)  # the last observations
        # Copies in processes have their own deadline.
        self._watchdog: AbstractContextManager[None] = nullcontext()
        if isinstance(vector, ManualResetVectorEnv):
            self._watchdog = Watchdog(config.timeout_seconds, f"environment {config.id!r}")
        self._make_one = make_one
        self._snapshots: bool | None = None
        self._ended_N = np.ones(vector.num_envs, dtype=np.bool_)  # no episode has begun
        self.count: int = vector.num_envs
        self.observation_size: int = self._adapter.observation_size
        self.actions: ActionSpace = self._adapter.actions
        self.picture = Picture.of(self._adapter.observed)  # None: it observes no pictures
        self.metadata: dict[str, Any] = dict(vector.metadata)  # Gymnasium's: render_modes, render_fps

    @property
    def snapshots(self) -> bool:
        """True if states can be copied exactly, which the first access tests on a separate copy."""
        if self._snapshots is None:
            self._snapshots = isinstance(self._vector, BatchedEnv) or (
                self._vector.copies_states()
                if isinstance(self._vector, IsolatedVectorEnv)
                else isinstance(self._vector, ManualResetVectorEnv)
                and self._make_one is not None
                and copies_are_exact(self._make_one)
            )
        return self._snapshots

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parts of a Dict observation that are not numbers, so that the policy does not see them."""
        vector: Any = self._vector
        found: tuple[str, ...] = () if isinstance(vector, BatchedEnv) else vector.get_attr("left_out")[0]
        return found

    def reset(self, seeds: Sequence[int]) -> NDArray[np.float32]:
        """Begin an episode in every slot; returns their first observations [N, D]. Call it before all other methods."""
        numbers: Any = [int(seed) for seed in seeds]
        with self._watchdog:
            observations, _ = self._vector.reset(seed=numbers)
        self._ended_N[:] = False
        return self._seen(observations)

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
        return self._seen(observations)[slots]

    def step(self, actions: NDArray[Any]) -> Step:
        """Act in every slot: int64 [N], or float32 [N, A], which are clipped to the bounds of the action space.

        Finished slots ignore their action.
        """
        acted_N = ~self._ended_N
        with self._watchdog:
            observations, rewards, terminated_N, truncated_N, infos = self._vector.step(
                self._adapter.to_environment(actions)
            )
        observation_ND = self._seen(observations)
        self._ended_N |= terminated_N
        self._ended_N |= truncated_N
        return Step(
            observation_ND=observation_ND,
            reward_N=np.array(rewards, dtype=np.float64),
            terminated_N=terminated_N,
            truncated_N=truncated_N,
            steps_N=np.asarray(infos.get(RAW_STEPS, acted_N), dtype=np.int64),
            failed_N=infos.get(FAILED),
        )

    def random_actions(self, position: int) -> NDArray[Any]:
        """An allowed action for every slot, drawn uniformly (`SpaceAdapter.random_actions`)."""
        return self._adapter.random_actions(np.random.default_rng(position), self._row_ND)

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

    def _seen(self, observations: Any) -> NDArray[np.float32]:
        """Flatten the observations of all slots and check that they are finite.

        Raises:
            EnvironmentFault: if a number in them is NaN or infinite.
        """
        self._row_ND = observation_ND = self._adapter.flatten(observations)
        if np.isfinite(observation_ND).all():
            return observation_ND
        slot, number = (int(index) for index in np.argwhere(~np.isfinite(observation_ND))[0])
        place = f"environment {self._name!r}, copy {slot}"
        if isinstance(self._vector, SyncVectorEnv | AsyncVectorEnv | IsolatedVectorEnv):
            place = self._vector.get_attr("place")[slot]
        raise EnvironmentFault(f"{place}: number {number} of its observation is {observation_ND[slot, number]}")


def make_environments(
    config: EnvironmentConfig, count: int, *, render_mode: str | None = None, copies_states: bool = False
) -> Environments:
    """Create `count` copies of the environment in the config.

    Args:
        config: of the environment.
        count: number of copies.
        render_mode: that of Gymnasium.
        copies_states: whether states will be copied; an environment whose state cannot be packed for another process is
            in this one.

    Raises:
        ConfigError: for an unknown id, a missing package, unsupported spaces, or a combination of settings that the
            environment does not support.
    """
    spec = find_spec(config.id)
    make_one = _Maker(config, spec, render_mode)
    make_all = partial(ManualResetVectorEnv, [make_one] * count, autoreset_mode=AutoresetMode.DISABLED)
    known = str(spec.entry_point).startswith(OF_GYMNASIUM) and not spec.additional_wrappers
    with refuse_broken(config.id):
        batched = _batched(config, spec) if render_mode is None else None
        if batched is not None:
            limit = config.max_episode_steps or spec.max_episode_steps or sys.maxsize
            return Environments(batched(count, limit), config)
        if config.vectorization == "auto" and not known and may_fork():
            isolated = IsolatedVectorEnv(make_all, config.id, config.timeout_seconds)
            if not copies_states or isolated.copies_states():
                return Environments(isolated, config)
            isolated.close()
        _refuse_spaces(make_one, config.id)  # before processes are started
        if config.vectorization == "async":
            kind: Any = partial(AsyncWithDeadline, name=config.id, timeout_seconds=config.timeout_seconds)
            return Environments(kind([make_one] * count, autoreset_mode=AutoresetMode.DISABLED), config)
        return Environments(make_all(), config, make_one)


def longest_episode(config: EnvironmentConfig) -> int | None:
    """Decisions after which the time limit ends an episode; None if neither config nor registration has one.

    Raises:
        ConfigError: for an unknown id.
    """
    raw_steps = config.max_episode_steps or find_spec(config.id).max_episode_steps
    return None if raw_steps is None else math.ceil(raw_steps / config.action_repeat)


def check_environment(config: EnvironmentConfig) -> tuple[str, ...]:
    """Test an environment by random actions in two copies, and refuse one that cannot be used.

    Returns:
        Notes for the user: results that do not depend on the reset seed and the actions alone, and episodes that may
        never end.

    Raises:
        ConfigError: as `make_environments`; for an environment that raises, returns invalid values, dies or hangs, and
            for one without a time limit within LONGEST_WAIT of which no episode ends in `PROBED_STEPS`.
    """
    environments = make_environments(replace(config, vectorization="auto"), 2)
    left_out = environments.left_out
    longest = longest_episode(config)
    endless = longest is None or longest > LONGEST_WAIT
    limit = "no time limit" if longest is None else f"a time limit of {longest:,} decisions"
    try:
        made, ended, truncated, differs = _probe(environments, PROBED_STEPS if endless else PROBED_STEPS // 50)
    except EnvironmentFault as error:
        raise ConfigError(str(error)) from error
    finally:
        environments.close()
    if endless and not ended:
        raise ConfigError(
            f"environment.id: {config.id!r} has {limit}, and none of its episodes ended in {made:,} random "
            "steps: set environment.max_episode_steps"
        )
    notes = []
    if left_out:
        notes.append(
            f"environment {config.id!r}: {', '.join(map(repr, left_out))} of its observation is not numbers: the "
            "policy does not see it"
        )
    if differs:
        notes.append(
            f"environment {config.id!r}: {differs}, so the episodes of a group differ by chance, and a resumed run "
            "does not repeat itself: call super().reset(seed=seed), and take random numbers from self.np_random alone"
        )
    if endless and not truncated:
        notes.append(
            f"environment {config.id!r} has {limit}, and a trained policy may never end an episode: set "
            "environment.max_episode_steps"
        )
    return tuple(notes)


def _probe(environments: Environments, steps: int) -> tuple[int, bool, bool, str]:
    """Play an episode in two copies with the same seed and the same random actions.

    Returns:
        The number of steps, whether the episode ended, whether it was truncated, and a description of the first
        difference of the copies.
    """
    until = time.monotonic() + PROBED_SECONDS
    observation_2D = environments.reset([0, 0])
    differs = "" if _alike(observation_2D) else "reset(seed=0) began two episodes with different observations"
    made, ended, truncated = 0, False, False
    while made < steps and not ended and time.monotonic() < until:
        actions = environments.random_actions(made)
        actions[1] = actions[0]
        step = environments.step(actions)
        made += 1
        results: tuple[NDArray[Any], ...] = step.observation_ND, step.reward_N, step.terminated_N, step.truncated_N
        if not differs and not all(map(_alike, results)):
            differs = f"step {made} of two episodes with the same reset(seed=0) and actions had different results"
        truncated = bool(step.truncated_N[0])
        ended = truncated or bool(step.terminated_N[0])
    if not differs and not np.array_equal(environments.reset([0, 0]), observation_2D):
        differs = "reset(seed=0) began a second episode with another observation than the first"
    return made, ended, truncated, differs


def _alike(result_2: NDArray[Any]) -> bool:
    """True if both copies have the same result."""
    return np.array_equal(result_2[0], result_2[1])


@dataclass
class _Maker:
    """Creates the copies of a sync or async vector environment."""

    config: EnvironmentConfig
    spec: gym.envs.registration.EnvSpec
    render_mode: str | None
    masked: bool | None = None  # whether they give action masks; None: none was made

    def __call__(self) -> ActionRepeat:
        config = self.config
        options: dict[str, Any] = {} if self.render_mode is None else {"render_mode": self.render_mode}
        limit = config.max_episode_steps or None
        env: gym.Env
        if self.spec.entry_point is None:
            registered = self.spec.max_episode_steps  # which Gymnasium hands to the class
            if limit and registered:
                options["max_episode_steps"] = limit
            env = VectorOfOne(gym.make_vec(self.spec, 1, "vector_entry_point", **options))
            if limit := limit or registered:
                env = gym.wrappers.TimeLimit(env, limit)
        else:  # `ActionRepeat` checks more than Gymnasium's checker
            env = gym.make(self.spec, max_episode_steps=limit, disable_env_checker=True, **options)
        env, left_out = numeric_parts(env)
        if config.frame_stack > 1:
            if has_mask(env.observation_space):
                raise ConfigError(
                    f"environment.frame_stack: {config.id!r} has its action mask in the observation, which would be "
                    "stacked too: give it in info['action_mask'], or by a method action_masks()"
                )
            env = gym.wrappers.FrameStackObservation(env, config.frame_stack)
        reader = find_reader(env) if config.action_masks and self.masked is not False else None
        self.masked = reader is not None
        masks = None if reader is None else ActionMasks(reader, env, config.id)
        repeated = ActionRepeat(env, config.action_repeat, config.id, masks)
        repeated.left_out, repeated.refuses_masks = left_out, config.action_masks
        return repeated


def _refuse_spaces(make_one: Callable[[], ActionRepeat], name: str) -> None:
    """Refuse unsupported spaces."""
    env = make_one()
    try:
        SpaceAdapter(env.observation_space, env.action_space, name, masked=env.masked)
    finally:
        env.close()


def _batched(config: EnvironmentConfig, spec: gym.envs.registration.EnvSpec) -> type[BatchedEnv] | None:
    """The class that implements these settings exactly for all copies at once; None: there is none."""
    plain = config.vectorization == "auto" and config.action_repeat == config.frame_stack == 1
    if not plain or spec.kwargs or spec.additional_wrappers:
        return None
    return BATCHED.get(str(spec.entry_point))
