"""The batched CartPole and Acrobot against Gymnasium's single ones."""

import gymnasium as gym
import numpy as np
import pytest

from covey.config import EnvironmentConfig
from covey.control.envs.batched import BatchedCartPole, BatchedEnv
from covey.control.envs.vector_env import make_environments


def balance(observation_ND: np.ndarray) -> np.ndarray:
    """A controller that keeps the pole up for hundreds of steps."""
    return (observation_ND @ np.array([0.1, 0.3, 1.0, 0.8]) > 0).astype(np.int64)


def swing(observation_ND: np.ndarray) -> np.ndarray:
    """A controller that pushes the second link with its motion, which swings the tip up within a hundred steps."""
    return np.where(observation_ND[:, 5] > 0, 2, 0)


CONTROLLERS = {"CartPole-v1": balance, "Acrobot-v1": swing}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "limit", "steps"), [("CartPole-v1", 0, 1100), ("CartPole-v1", 60, 1100), ("Acrobot-v1", 110, 360)]
)
def test_every_step_is_that_of_the_single_environment(name: str, limit: int, steps: int) -> None:
    """Observations to the last bit, rewards and ends, for good, bad and random actions, over several episodes."""
    count, choices = 12, gym.make(name).action_space.n
    environments = make_environments(EnvironmentConfig(id=name, max_episode_steps=limit), count)
    assert isinstance(environments._vector, BatchedEnv)
    singles = [gym.make(name, max_episode_steps=limit or None) for _ in range(count)]
    rng = np.random.default_rng(1)
    seeds = [
        835,
        1506,
        1692,
        *range(100, 97 + count),
    ]  # the first: fp64 rounds sines of Acrobot's start otherwise
    current_ND = environments.reset(seeds)
    for slot, single in enumerate(singles):
        assert single.reset(seed=seeds[slot])[0].tobytes() == current_ND[slot].tobytes()
        assert np.array_equal(single.unwrapped.state, environments.snapshot(slot)[1][0])
    truncated = terminated = 0
    for time in range(steps):
        drawn = rng.integers(0, choices, count)
        actions = np.where(np.arange(count) < count // 2, CONTROLLERS[name](current_ND), drawn)
        step = environments.step(actions)
        assert step.steps_N.all()
        for slot, single in enumerate(singles):
            observation, reward, ended, cut, _ = single.step(int(actions[slot]))
            assert observation.tobytes() == step.observation_ND[slot].tobytes()
            assert np.array_equal(single.unwrapped.state, environments.snapshot(slot)[1][0])
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
    assert terminated > 5


@pytest.mark.parametrize(
    ("name", "limit", "paid"),
    [("CartPole-v1", 5, 1), ("CartPole-v1", 20, 1), ("Acrobot-v1", 5, -1)],
    ids=["truncated", "terminated", "Acrobot"],
)
def test_finished_copies_stand_still_and_earn_nothing(name: str, limit: int, paid: float) -> None:
    environments = make_environments(EnvironmentConfig(id=name, max_episode_steps=limit), 2)
    environments.reset([0, 1])
    last = None
    for _ in range(300):
        step = environments.step(np.ones(2, dtype=np.int64))
        assert not (step.truncated_N & (step.steps_N == 0)).any()
        assert not (step.terminated_N & (step.steps_N == 0)).any()
        assert (step.reward_N == paid * step.steps_N).all()
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
        EnvironmentConfig(id="Acrobot-v1", frame_stack=2),
        EnvironmentConfig(id="MountainCar-v0"),
    ],
)
def test_other_settings_take_gymnasiums_own(config: EnvironmentConfig) -> None:
    assert not isinstance(make_environments(config, 2)._vector, BatchedEnv)


def test_an_acrobot_goes_on_from_a_copied_state_as_the_original() -> None:
    environments = make_environments(EnvironmentConfig(id="Acrobot-v1"), 2, copies_states=True)
    assert environments.snapshots
    first_ND = environments.reset([3, 4])
    states = [environments.snapshot(0)]
    seen = [environments.step(np.array([2, 0])).observation_ND[0]]
    states.append(environments.snapshot(0))
    seen += [environments.step(np.array([2, 0])).observation_ND[0]]
    assert environments.restore(1, states[0]).tobytes() == first_ND[0].tobytes()
    for row, state in zip(seen, states, strict=True):
        environments.restore(1, state)
        assert environments.step(np.array([0, 2])).observation_ND[1].tobytes() == row.tobytes()
