"""Copies of an environment that may be stepped while they rest, and whose state can be copied.

Gymnasium's AutoresetMode.DISABLED asks the caller to reset a finished copy before the next step. Here it may simply be
left alone: its steps cost nothing and change nothing until somebody resets it.

Shape legend: N slots (copies).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

RAW_STEPS = "covey/raw_steps"  # in the infos of a step
PROBE_STEPS = 24  # decisions over which a copied environment must do what the original does


class HeldAction(gym.Wrapper):
    """Holds every action for `repeat` raw steps (fewer where the episode ends) and adds up their rewards.

    With `rests` a finished environment ignores steps until it is reset. Infos are dropped, because merging those of
    many copies is slow and nobody reads them; with `repeat` above 1 RAW_STEPS says how many were made.
    """

    def __init__(self, env: gym.Env, repeat: int, rests: bool) -> None:
        super().__init__(env)
        self._repeat, self._rests, self._over = repeat, rests, False
        self.observation: Any = None  # the latest

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._over = False
        self.observation, _ = self.env.reset(seed=seed, options=options)
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._over:
            return self.observation, 0.0, False, False, {}
        total = 0.0
        for made in range(1, self._repeat + 1):  # noqa: B007
            self.observation, reward, terminated, truncated, _ = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                self._over = self._rests
                break
        return self.observation, total, terminated, truncated, {RAW_STEPS: made} if self._repeat > 1 else {}


class RestingSync(SyncVectorEnv):
    """SyncVectorEnv with AutoresetMode.DISABLED whose finished copies may be stepped: they rest (`HeldAction`)."""

    def step(self, actions: Any) -> Any:
        self._autoreset_envs[:] = False  # Gymnasium would refuse to step while a finished copy was not reset
        return super().step(actions)

    def snapshot(self, slot: int) -> gym.Env:
        """A copy of a sub-environment."""
        return copy.deepcopy(self.envs[slot])

    def restore(self, slot: int, snapshot: gym.Env) -> Any:
        """Put a copy of the snapshot into a slot; returns the latest observation there."""
        env = copy.deepcopy(snapshot)
        self.envs[slot] = env
        self._env_obs[slot] = env.observation  # type: ignore[attr-defined]
        return self._env_obs[slot]


class RestingEntryPoint(gym.vector.VectorWrapper):
    """An environment's own vector class with AutoresetMode.DISABLED, whose finished slots may be stepped.

    Such a class may refuse to step a slot that is over. So these are reset, stepped along and left out of the answer.
    """

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self._ended_N = np.zeros(env.num_envs, dtype=np.bool_)
        self._stale_N = np.zeros(env.num_envs, dtype=np.bool_)  # over for us, running along inside

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask_N = (options or {}).get("reset_mask")
        self._stale_N[slice(None) if mask_N is None else mask_N] = False
        self._ended_N[slice(None) if mask_N is None else mask_N] = False
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        if self._ended_N.any():
            self.env.reset(options={"reset_mask": self._ended_N.copy()})
        observations, rewards, terminated_N, truncated_N, _ = self.env.step(actions)
        self._stale_N |= self._ended_N
        self._ended_N = terminated_N | truncated_N
        acted_N = ~self._stale_N
        return observations, rewards * acted_N, terminated_N & acted_N, truncated_N & acted_N, {}


def copies_exactly(make_one: Callable[[], gym.Env]) -> bool:
    """Whether a deep copy of the environment goes on exactly as the original, and leaves the original alone.

    Simulators written in C often share their world between copies, or refuse to be copied.
    """
    env = make_one()
    try:
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(2 * PROBE_STEPS)]
        env.reset(seed=0)
        _trace(env, actions[:PROBE_STEPS])
        snapshot = copy.deepcopy(env)
        traces = [_trace(each, actions[PROBE_STEPS:]) for each in (env, copy.deepcopy(snapshot), snapshot)]
        return traces[0] == traces[1] == traces[2]
    except Exception:  # whatever a foreign environment raises when it is copied: it cannot be
        return False
    finally:
        env.close()


def _trace(env: gym.Env, actions: Sequence[Any]) -> list[bytes]:
    """All that an environment answers to these actions, bit by bit, and to resets without a seed where it ends."""
    answers: list[bytes] = []

    def note(observation: Any, *numbers: Any) -> None:
        flat = np.asarray(gym.spaces.flatten(env.observation_space, observation))
        answers.append(flat.tobytes() + np.array(numbers, dtype=np.float64).tobytes())

    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        note(observation, reward, terminated, truncated)
        if terminated or truncated:
            note(env.reset()[0])
    note(env.reset()[0])
    return answers
