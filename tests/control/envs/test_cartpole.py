"""The batched CartPole against Gymnasium's single one."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from covey.config import EnvironmentConfig
from covey.control.envs.cartpole import BatchedCartPole
from covey.control.envs.vector_env import make_environments


def balance(observation_ND: np.ndarray) -> np.ndarray:
    """A controller that keeps the pole up for hundreds of steps."""
    return (observation_ND @ np.array([0.1, 0.3, 1.0, 0.8]) > 0).astype(np.int64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", [0, 60])
def test_every_step_is_that_of_the_single_environment(limit: int) -> None:
    """Observations to the last bit, rewards and ends, for good, bad and random actions, over several episodes."""
    count = 12
    environments = make_environments(EnvironmentConfig(id="CartPole-v1", max_episode_steps=limit), count)
    assert isinstance(environments._vector, BatchedCartPole)
    singles = [gym.make("CartPole-v1", max_episode_steps=limit or None) for _ in range(count)]
    rng = np.random.default_rng(1)
    seeds = list(range(100, 100 + count))
    current_ND = environments.reset(seeds)
    for slot, single in enumerate(singles):
        assert single.reset(seed=seeds[slot])[0].tobytes() == current_ND[slot].tobytes()
    truncated = terminated = 0
    for time in range(1100):
        actions = np.where(np.arange(count) < count // 2, balance(current_ND), rng.integers(0, 2, count))
        step = environments.step(actions)
        assert step.steps_N.all()
        for slot, single in enumerate(singles):
            observation, reward, ended, cut, _ = single.step(int(actions[slot]))
            assert observation.tobytes() == step.observation_ND[slot].tobytes()
            assert (reward, ended, cut) == (step.reward_N[slot], step.terminated_N[slot], step.truncated_N[slot])
        over = np.flatnonzero(step.terminated_N | step.truncated_N)
        truncated, terminated = truncated + int(step.truncated_N.sum()), terminated + int(step.terminated_N.sum())
        current_ND = step.observation_ND
        if len(over):
            current_ND = current_ND.copy()
            current_ND[over] = environments.reset_slots(over, [1000 * time + int(slot) for slot in over])
            for slot in over:
                singles[slot].reset(seed=1000 * time + int(slot))
    assert truncated > 5
    assert terminated > 50


@pytest.mark.parametrize("limit", [5, 20])  # truncated, terminated
def test_finished_carts_stand_still_and_earn_nothing(limit: int) -> None:
    environments = make_environments(EnvironmentConfig(id="CartPole-v1", max_episode_steps=limit), 2)
    environments.reset([0, 1])
    last = None
    for _ in range(300):
        step = environments.step(np.ones(2, dtype=np.int64))
        assert not (step.truncated_N & (step.steps_N == 0)).any()
        assert not (step.terminated_N & (step.steps_N == 0)).any()
        assert (step.reward_N == step.steps_N).all()
        if not step.steps_N.any():
            assert last is None or step.observation_ND.tobytes() == last
            last = step.observation_ND.tobytes()
    assert last is not None


def test_a_start_needs_its_seed() -> None:
    with pytest.raises(ValueError, match="list of 2 seeds"):
        BatchedCartPole(2).reset(seed=3)


@pytest.mark.parametrize(
    "config",
    [
        EnvironmentConfig(id="CartPole-v1", action_repeat=2),
        EnvironmentConfig(id="CartPole-v1", vectorization="sync"),
        EnvironmentConfig(id="Acrobot-v1"),
    ],
)
def test_other_settings_take_gymnasiums_own(config: EnvironmentConfig) -> None:
    assert not isinstance(make_environments(config, 2)._vector, BatchedCartPole)
