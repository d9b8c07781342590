"""Vector environments whose finished copies ignore steps until they are reset, and whose states can be copied.

Gymnasium's AutoresetMode.DISABLED requires a reset of a finished copy before the next step. Here further steps of a
finished copy have no effect.

Shape legend: N slots (copies).
"""

import copy
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from numpy.typing import NDArray

from covey.control.envs.checked import EnvironmentFault, checked_flag, checked_observation, checked_reward, fault_of
from covey.control.envs.spaces import MASK, ActionMasks, SpaceAdapter
from covey.runtime.variables import safe_path

RAW_STEPS = "covey/raw_steps"  # key in the infos of a step
FAILED = "covey/failed"  # the same: slots whose process died or hung in this step, which truncated their episode
PROBE_STEPS = 24  # decisions over which a copied environment is compared with the original


class ActionRepeat(gym.Wrapper):
    """Repeats every action for `repeat` raw steps, or until the episode ends, and sums their rewards.

    A finished environment ignores steps until it is reset. Infos are dropped, because merging those of many copies is
    slow and they are not read; with `repeat` above 1, RAW_STEPS is the number of raw steps. The environment's results
    are checked here, except that observations are finite, which `Environments` checks for all copies at once. `masks`
    become a part of its observations.
    """

    def __init__(self, env: gym.Env, repeat: int, name: str, masks: ActionMasks | None = None) -> None:
        super().__init__(env)
        self._repeat, self._over, self._name = repeat, False, name
        self._masks = masks
        if masks is not None:
            self.observation_space = masks.space
        self._seed: int | None = None
        self._steps = 0  # number of steps of the episode
        self.observation: Any = None  # the last one
        self.slot = 0
        self.known_place: NDArray[np.int64] | None = None  # slot, seed, step of a call, for another process
        self.skips_reset = False
        self.left_out: tuple[str, ...] = ()  # parts of a Dict observation that are not numbers
        self.refuses_masks = False  # in an info: nothing reads them if the first reset gave none

    @property
    def masked(self) -> bool:
        """True if its observations have action masks."""
        return self._masks is not None

    @property
    def place(self) -> str:
        """Environment, episode and step, for messages."""
        return place_of(self._name, self._seed, self._steps)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.skips_reset:
            self.skips_reset = False
            return self.observation, {}
        self._over, self._seed, self._steps = False, seed, 0
        self.note_place()
        try:
            answer = self.env.reset(seed=seed, options=options)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise TypeError("its reset returned no pair of observation and info: adapt it to Gymnasium 1")
            self._observe(*answer)
        except Exception as error:
            raise fault_of(error, self.place) from error
        return self.observation, {}

    def _observe(self, observation: Any, info: dict[str, Any]) -> None:
        self.observation = checked_observation(observation, self.env.observation_space)
        if self._masks is not None:
            self.observation = self._masks.join(self.observation, info, over=self._over)
        elif self.refuses_masks and MASK in info:
            raise ValueError(
                f"its info has an {MASK!r}, and its first reset gave none: give the mask in reset as well, or "
                "set environment.action_masks = false"
            )

    def note_place(self) -> None:
        """Tell another process in which slot, episode and step a call is."""
        if self.known_place is not None:
            self.known_place[:] = self.slot, -1 if self._seed is None else self._seed, self._steps

    def rest(self, observation: Any, *, skips_reset: bool) -> None:
        """Ignore steps until the next reset; with `skips_reset` until the one after it."""
        self._over, self.observation, self.skips_reset = True, observation, skips_reset

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._over:
            return self.observation, 0.0, False, False, {}
        total = 0.0
        try:
            for made in range(1, self._repeat + 1):  # noqa: B007
                self._steps += 1
                self.note_place()
                observation, reward, ended, cut, info = self.env.step(action)
                total += checked_reward(reward)
                terminated, truncated = checked_flag(ended, "terminated"), checked_flag(cut, "truncated")
                self._over = terminated or truncated
                self._observe(observation, info)
                if self._over:
                    break
        except Exception as error:
            raise fault_of(error, self.place) from error
        return self.observation, total, terminated, truncated, {RAW_STEPS: made} if self._repeat > 1 else {}


def place_of(name: str, seed: int | None, steps: int) -> str:
    """Environment, episode and step, for messages. `steps` is 0 in the reset of the episode."""
    episode = "an episode" if seed is None else f"the episode that began with reset(seed={seed})"
    call = f"step {steps} of {episode}" if steps else f"the reset of {episode}"
    return f"environment {name!r}, {call}"


class ManualResetVectorEnv(SyncVectorEnv):
    """SyncVectorEnv with AutoresetMode.DISABLED whose finished copies ignore steps (`ActionRepeat`)."""

    def step(self, actions: Any) -> Any:
        self._autoreset_envs[:] = False  # Gymnasium would refuse to step a finished copy
        return super().step(actions)

    def reset_slots(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """As `reset`, with arguments by position."""
        return self.reset(seed=seed, options=options)

    def replay(self, slot: int, origin: int | bytes, actions: Sequence[Any]) -> Any:
        """Play an episode again in a slot, from its seed or a packed state; returns its last observation."""
        if isinstance(origin, bytes):
            self.unpack(slot, origin)
        else:
            self._env_obs[slot], _ = self.envs[slot].reset(seed=origin)
        for action in actions:
            self._env_obs[slot] = self.envs[slot].step(action)[0]
        return self._env_obs[slot]

    def rest(self, slot: int, observation: Any, skips_reset: bool) -> Any:
        """Leave a slot with this observation until its next reset, or until the one after it; returns it."""
        self.envs[slot].rest(observation, skips_reset=skips_reset)  # type: ignore[attr-defined]
        self._env_obs[slot] = observation
        return observation

    def snapshot(self, slot: int) -> gym.Env:
        """A copy of a sub-environment."""
        return copy.deepcopy(self.envs[slot])

    def restore(self, slot: int, snapshot: gym.Env) -> Any:
        """Put a copy of the snapshot into a slot; returns its last observation."""
        env = copy.deepcopy(snapshot)
        self.envs[slot] = env
        self._env_obs[slot] = env.observation  # type: ignore[attr-defined]
        return self._env_obs[slot]

    def pack(self, slot: int) -> bytes:
        """The state of a sub-environment as bytes, for another process."""
        env: Any = self.envs[slot]
        env.note_place()
        return _packed(env)

    def unpack(self, slot: int, state: bytes) -> Any:
        """Put a packed sub-environment into a slot; returns its last observation."""
        before: Any = self.envs[slot]
        before.note_place()
        if before.skips_reset:
            before.skips_reset = False
            return before.observation
        env = cloudpickle.loads(state)  # of a process of this run
        env.slot, env.known_place = before.slot, before.known_place
        self.envs[slot], self._env_obs[slot] = env, env.observation
        return env.observation

    def packs_states(self) -> bool:
        """True if `pack` and `unpack` make exact copies."""
        return copies_are_exact(self.env_fns[0], lambda env: cloudpickle.loads(_packed(env)))


def _packed(env: gym.Env) -> bytes:
    packed: bytes = cloudpickle.dumps(env)
    return packed


class AsyncWithDeadline(AsyncVectorEnv):
    """AsyncVectorEnv with a deadline of `timeout_seconds` per call; a process that dies is an error too."""

    def __init__(self, makers: Sequence[Callable[[], gym.Env]], name: str, timeout_seconds: float, **options: Any):
        self._name, self._timeout_seconds = name, timeout_seconds
        with nullcontext() if multiprocessing.get_start_method() == "fork" else safe_path():
            super().__init__(makers, **options)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with self._watched("reset"):
            self.reset_async(seed=seed, options=options)
            return self.reset_wait(timeout=self._timeout_seconds)

    def step(self, actions: Any) -> Any:
        with self._watched("step"):
            self.step_async(actions)
            return self.step_wait(timeout=self._timeout_seconds)

    @contextmanager
    def _watched(self, call: str) -> Iterator[None]:
        level, gym.logger.min_level = gym.logger.min_level, gym.logger.ERROR + 1  # the run reports it
        try:
            yield
        except multiprocessing.TimeoutError:
            late = [i for i, pipe in enumerate(self.parent_pipes) if pipe is not None and not pipe.poll()]
            self._end()
            raise EnvironmentFault(
                f"environment {self._name!r}: the {call} of copy {late[0] if late else 0} did not end within "
                f"{self._timeout_seconds:g} s: if it is only slow, raise environment.timeout_seconds"
            ) from None
        except (EOFError, ConnectionError) as error:
            time.sleep(0.1)  # until the exit code of the dead process is known
            dead = [(i, process.exitcode) for i, process in enumerate(self.processes) if not process.is_alive()]
            self._end()
            copy_number, code = dead[0] if dead else (0, None)
            raise EnvironmentFault(
                f"environment {self._name!r}: the process of copy {copy_number} died in {call} (exit code {code})"
            ) from error
        except EnvironmentFault:
            self._end()
            raise
        finally:
            gym.logger.min_level = level

    def _end(self) -> None:
        """Kill every process with SIGKILL, which cannot be ignored."""
        for process in self.processes:
            process.kill()
        self._state = AsyncState.DEFAULT
        self.close(terminate=True)


def copies_are_exact(make_one: Callable[[], gym.Env], copied: Callable[[gym.Env], gym.Env] = copy.deepcopy) -> bool:
    """True if a copy of the environment behaves exactly like the original, and does not change it.

    Simulators written in C often share their state between copies, or cannot be copied.
    """
    env = make_one()
    try:
        env.reset(seed=0)
        _trace(env)
        snapshot = copied(env)
        traces = [_trace(each) for each in (env, copied(snapshot), snapshot)]
        return traces[0] == traces[1] == traces[2]
    except Exception:  # any exception of a user's environment means that it cannot be copied
        return False
    finally:
        env.close()


def _trace(env: Any) -> list[bytes]:
    """All results of an `ActionRepeat` for PROBE_STEPS random actions, as bytes, with resets without a seed at the ends
    of episodes.
    """
    answers: list[bytes] = []
    generator = np.random.default_rng(0)
    adapter = SpaceAdapter(env.observation_space, env.action_space, "", masked=env.masked)

    def note(observation: Any, *numbers: Any) -> None:
        flat = np.asarray(gym.spaces.flatten(env.observation_space, observation))
        answers.append(flat.tobytes() + np.array(numbers, dtype=np.float64).tobytes())

    for _ in range(PROBE_STEPS):
        drawn = adapter.random_actions(generator, adapter.flatten_one(env.observation)[None])
        observation, reward, terminated, truncated, _ = env.step(adapter.to_environment(drawn)[0])
        note(observation, reward, terminated, truncated)
        if terminated or truncated:
            note(env.reset()[0])
    note(env.reset()[0])
    return answers
