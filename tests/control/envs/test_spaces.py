"""Several choices at once, and observations in parts: the numbers of their policy, and that it learns."""

from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from covey.config import EnvironmentConfig
from covey.config.recipe import config_from_dict
from covey.control.envs.spaces import MultiDiscrete, SpaceAdapter
from covey.control.envs.vector_env import make_environments
from covey.control.policy import ControlPolicy, load_policy
from covey.data import EndReason, Group, Rollout, Start, collate
from covey.experiment.run import run

NAME = "covey-spaces/Locks-v0"
COUNTS = (2, 3, 4)


class Locks(gym.Env):
    """Every choice must be set to the number that is shown for it; each right one pays 1."""

    observation_space = spaces.Dict(
        first=spaces.Discrete(2), rest=spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1, 1, (4,), np.float32)))
    )
    action_space: Any = spaces.MultiDiscrete(COUNTS, start=[0, 5, -1])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.made = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        paid = float((np.asarray(action) - self.action_space.start == self.wanted).sum())
        self.made += 1
        return self._show(), paid, self.made == 5, False, {}

    def _show(self) -> Any:
        self.wanted = self.np_random.integers(COUNTS)
        shown = np.eye(4, dtype=np.float32)[self.wanted[2]]
        return {"first": self.wanted[0], "rest": (1 + self.wanted[1], shown)}


@pytest.fixture(autouse=True)
def _registered():
    gym.register(NAME, Locks)
    yield
    gym.registry.pop(NAME, None)


def make_policy() -> ControlPolicy:
    policy = ControlPolicy(3, MultiDiscrete(COUNTS), hidden=(8,), normaliser=None, seed=4)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return policy


def batch_of(observation_ND: Any, action_NA: Any) -> Any:
    """One decision a rollout."""
    rollouts = [
        Rollout(
            context=np.stack([o, o]), actions=a[None], behavior_logprobs=(0.0,), end=EndReason.TERMINATED, reward=0.0
        )
        for o, a in zip(observation_ND, action_NA, strict=True)
    ]
    return collate([Group(Start(0, 0), rollouts)])


def test_the_probabilities_of_all_actions_are_those_of_independent_choices():
    policy = make_policy()
    every_NA = np.array(list(product(*map(range, COUNTS))))
    observation_ND = np.tile(np.float32([0.3, -1.0, 2.0]), (len(every_NA), 1))
    evaluated = policy.evaluate(batch_of(observation_ND, every_NA))
    logits = policy.module.network(torch.from_numpy(observation_ND[:1]))[0].split(COUNTS)
    expected = torch.stack(
        [sum(part.log_softmax(0)[i] for part, i in zip(logits, a, strict=True)) for a in every_NA]
    ).detach()
    torch.testing.assert_close(evaluated.logprobs_BT[:, 0], expected)
    probability = expected.exp()
    assert float(probability.sum()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(evaluated.entropy_BT[:, 0], -(probability @ expected).expand(len(every_NA)))


def test_the_exact_kl_is_that_of_the_joint_distribution():
    from covey.core import kl

    policy, other = make_policy(), ControlPolicy(3, MultiDiscrete(COUNTS), hidden=(8,), normaliser=None, seed=9)
    every_NA = np.array(list(product(*map(range, COUNTS))))
    observation_ND = np.tile(np.float32([0.3, -1.0, 2.0]), (len(every_NA), 1))
    ours, theirs = (each.evaluate(batch_of(observation_ND, every_NA)) for each in (policy, other))
    joint = (ours.logprobs_BT.exp() * (ours.logprobs_BT - theirs.logprobs_BT)).sum()
    exact = kl.exact(ours.all_logprobs_BTV[:1], theirs.all_logprobs_BTV[:1])
    torch.testing.assert_close(exact[0, 0], joint)


def test_actions_are_drawn_with_their_probabilities():
    policy = make_policy()
    count = 20_000
    observation_ND = np.tile(np.float32([0.3, -1.0, 2.0]), (count, 1))
    uniform_NA = np.random.default_rng(0).random((count, 3))
    action_NA, logprob_N = policy.act(observation_ND, uniform_NA)
    evaluated = policy.evaluate(batch_of(observation_ND[:50], action_NA[:50]))
    np.testing.assert_allclose(logprob_N[:50], evaluated.logprobs_BT[:, 0].detach().numpy(), atol=1e-5)
    for action, probability in zip(*np.unique(action_NA, axis=0, return_index=True), strict=True):
        expected = np.exp(logprob_N[probability])
        found = (action_NA == action).all(axis=1).mean()
        assert abs(found - expected) < 5 * np.sqrt(expected / count)


def test_a_saved_policy_is_the_same(tmp_path):
    policy = make_policy()
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.actions == policy.actions
    observation_ND = np.float32([[0.3, -1.0, 2.0]])
    assert loaded.greedy_action(observation_ND).tolist() == policy.greedy_action(observation_ND).tolist()


@pytest.mark.parametrize(
    ("space", "sent"),
    [
        (spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]), [[0, 2], [4, 6]]),
        (spaces.MultiBinary(4), [0, 1, 1, 1]),
        (spaces.MultiBinary((2, 2)), [[0, 1], [1, 1]]),
        (spaces.Box(-0.1, 0.1, (2, 2), np.float64), [[-0.1, 0.0], [0.0, 0.1]]),
        (spaces.Box(-0.1, 0.1, (2, 2), np.float16), [[-np.float16(0.1), 0.0], [0.0, np.float16(0.1)]]),
    ],
    ids=str,
)
def test_actions_reach_the_environment_in_its_own_shape(space, sent, monkeypatch):
    taken: list[Any] = []

    def step(self: Any, action: Any) -> Any:
        assert action in space
        taken.append(np.asarray(action).tolist())
        return self._show(), 0.0, True, False, {}

    monkeypatch.setattr(Locks, "action_space", space)
    monkeypatch.setattr(Locks, "step", step)
    environments = make_environments(EnvironmentConfig(id=NAME, vectorization="sync"), 1)
    environments.reset([0])
    numbers: Any = {spaces.MultiDiscrete: [0, 1, 2, 3], spaces.Box: np.float32([-9, 0, 0, 9])}
    environments.step(np.array([numbers.get(type(space), [0, 1, 1, 1])]))
    assert taken == [sent]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": "grpo", "loss": {"credit": "reward_to_go_by_step"}},
        pytest.param(
            {"algorithm": "ppo", "rollouts": {"kind": "fragments", "environments": 8, "fragment_steps": 20}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["grpo", "ppo"],
)
def test_an_agent_learns_to_make_several_choices_from_observations_in_parts(tables, tmp_path):
    summary = run(
        config_from_dict(
            {
                **tables,
                "steps": 100,
                "run_dir": str(tmp_path / "run"),
                "environment": {"id": NAME},
                "update": {"learning_rate": 0.02, "epochs": 4},
                "evaluation": {"episodes": 40, "every": 0},
            }
        )
    )
    assert summary is not None
    (evaluation,) = summary["evaluations"]
    assert evaluation["after"]["score"] > 13  # of 15; at random 5.4


def test_a_discrete_observation_is_one_hot_from_its_first_number_on() -> None:
    adapter = SpaceAdapter(spaces.Discrete(4, start=-1), spaces.Discrete(2), "")
    row_ND = adapter.flatten(np.array([-1, 2, 0]))
    assert row_ND.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert row_ND.dtype == np.float32
    assert [adapter.flatten_one(number).tolist() for number in (-1, 2, 0)] == row_ND.tolist()
