"""Branches: they leave from an exact copy of a state, any state is as likely, only the first action is compared."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from covey.algorithms import grpo
from covey.control.envs.vector_env import Environments, Step
from covey.control.policy import ControlPolicy
from covey.control.sampler import BranchSampler, ResetSeeds, RewardScale
from covey.data import Group, Rollout, Start, collate
from covey.runtime.rng import BRANCHING, SAMPLING, uniforms
from helpers import toy_envs
from helpers.counting_environment import COUNTING

SEED, GAMMA, HORIZON, STARTS, SIZE = 4, 0.9, 5, 5, 4


def sampler_on(
    name: str,
    *,
    starts: int = STARTS,
    size: int = SIZE,
    horizon: int = HORIZON,
    spread: float = 1.0,
    seed: int = SEED,
    decisions: int = 1,
) -> BranchSampler:
    environments, trunks = (toy_envs.made(name, count, copies_states=True) for count in (starts * size, starts))
    policy = toy_envs.policy_for(environments, spread=spread)
    return BranchSampler(
        policy, environments, seed, RewardScale(), GAMMA, trunks=trunks, horizon=horizon, decisions=decisions
    )


def sample(sampler: BranchSampler, step: int = 1) -> list[Group]:
    starts = ResetSeeds().draw(sampler.seed, step, sampler.trunks.count)
    return sampler.sample(starts, sampler.environments.count // sampler.trunks.count, step)


class Replay:
    """One copy of the environment that is led to any state by its seed and the actions since, never by copying."""

    def __init__(self, environments: Environments, policy: ControlPolicy, step: int) -> None:
        self.environments, self.policy, self.step = environments, policy, step
        self.numbers = 1 if policy.module.log_std_A is None else len(policy.module.log_std_A)

    def draw(self, group: int, rollout: int, position: int, stream: int) -> np.ndarray:
        positions = np.arange(position * self.numbers, (position + 1) * self.numbers)
        return uniforms(SEED, self.step, group, rollout, positions, stream=stream)[None]

    def trunk(self, start: Start, group: int) -> tuple[list[np.ndarray], list[np.ndarray], float]:
        """Observations before each action, actions, and the return of the episode that branches leave."""
        observation_1D = self.environments.reset([start.prompt])
        seen, actions, total = [], [], 0.0
        while True:
            seen.append(observation_1D[0].copy())
            action, _ = self.policy.act(observation_1D, self.draw(group, 0, len(actions), BRANCHING))
            actions.append(action.copy())
            result = self.environments.step(action)
            total += float(result.reward_N[0])
            if result.terminated_N[0] or result.truncated_N[0]:
                return seen, actions, total
            observation_1D = result.observation_ND

    def branch(self, start: Start, led: list[np.ndarray], group: int, rollout: int) -> tuple[Rollout, int]:
        """What a branch after these actions must look like: its first decision, its reward, its length."""
        observation_1D = self.environments.reset([start.prompt])
        for action in led:
            observation_1D = self.environments.step(action).observation_ND
        rewards: list[float] = []
        while len(rewards) < HORIZON:
            action, logprob = self.policy.act(observation_1D, self.draw(group, rollout, len(rewards), SAMPLING))
            result = self.environments.step(action)
            if not rewards:
                context = np.stack([observation_1D[0], result.observation_ND[0]])
                first, first_logprob = action.copy(), logprob.copy()
            rewards.append(float(result.reward_N[0]))
            observation_1D = result.observation_ND
            if result.terminated_N[0] or result.truncated_N[0]:
                break
        reward = sum(GAMMA**t * r for t, r in enumerate(rewards))
        return Rollout(context, first, first_logprob, None, reward=reward), len(rewards)


def index_of(observation_D: np.ndarray, seen: list[np.ndarray]) -> int:
    (index,) = [i for i, other in enumerate(seen) if np.allclose(other, observation_D, rtol=1e-5, atol=1e-6)]
    return index


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["CartPole-v1", toy_envs.NOISY, toy_envs.TARGET, COUNTING])
@pytest.mark.parametrize("step", [1, 2])
def test_branches_go_on_exactly_from_a_state_of_the_episode(name: str, step: int) -> None:
    """Against a replay of the episode's and the branch's own actions; Noisy and Target draw from their generators."""
    sampler = sampler_on(name)
    for earlier in range(1, step):
        sample(sampler, earlier)
    groups = sample(sampler, step)
    replay = Replay(toy_envs.made(name, 1), sampler.policy, step)
    lengths, left_at = set(), set()
    for number, group in enumerate(groups):
        seen, actions, total = replay.trunk(group.start, number)
        assert group.rollouts[0].score == pytest.approx(total, rel=1e-6)
        assert [rollout.score for rollout in group.rollouts[1:]] == [None] * (SIZE - 1)
        left = index_of(group.rollouts[0].context[0], seen)
        left_at.add(left)
        for index, rollout in enumerate(group.rollouts):
            expected, length = replay.branch(group.start, actions[:left], number, index)
            np.testing.assert_allclose(rollout.context, expected.context, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(rollout.actions, expected.actions, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(rollout.behavior_logprobs, expected.behavior_logprobs, rtol=1e-4, atol=1e-5)
            assert rollout.reward == pytest.approx(expected.reward, rel=1e-4, abs=1e-5)
            assert int(rollout.text.split()[0]) == length
            lengths.add(length)
    assert len(left_at) > 1
    if name != COUNTING:
        assert HORIZON in lengths, "some branches are cut"


@pytest.mark.parametrize("name", ["CartPole-v1", toy_envs.TARGET])
def test_only_the_first_action_is_compared(name: str) -> None:
    sampler = sampler_on(name)
    groups = sample(sampler)
    batch = collate(groups)
    assert batch.mask_BT.tolist() == [[True]] * (STARTS * SIZE)
    assert all(len(context) == 2 for context in batch.context)
    assert batch.rewards_BT[:, 0].tolist() == batch.reward_B.tolist()
    advantages_BT = grpo().advantage(batch).advantages_BT
    reward_GS = batch.reward_B.view(STARTS, SIZE)
    expected_GS = reward_GS - reward_GS.mean(dim=1, keepdim=True)
    assert advantages_BT.view(STARTS, SIZE).sign().tolist() == expected_GS.sign().tolist()
    gap_B = sampler.policy.evaluate(batch).logprobs_BT[:, 0] - batch.behavior_logprobs_BT[:, 0]
    assert float(gap_B.abs().max().detach()) < 1e-5


@pytest.mark.parametrize("decisions", [2, 3])
def test_a_rollout_has_the_first_decisions_of_its_branch(decisions: int) -> None:
    """The branches are the same; the last decision is paid what the rest of the branch earned, discounted."""
    short, whole, found = (
        sample(sampler_on(COUNTING, starts=12, horizon=3, decisions=count)) for count in (1, 3, decisions)
    )
    lengths = set()
    for groups in zip(short, whole, found, strict=True):
        for first, all_of_it, made in zip(*(group.rollouts for group in groups), strict=True):
            length = int(first.text.split()[0])
            kept = min(decisions, length)
            lengths.add(length)
            assert (first.text, first.reward, first.end) == (made.text, made.reward, made.end)
            assert len(all_of_it.actions) == length
            assert made.actions.tolist() == all_of_it.actions[:kept].tolist()
            assert made.context.tolist() == all_of_it.context[: kept + 1].tolist()
            assert made.behavior_logprobs.tolist() == all_of_it.behavior_logprobs[:kept].tolist()
            assert made.step_rewards[: kept - 1].tolist() == all_of_it.step_rewards[: kept - 1].tolist()
            earned = sum(GAMMA**t * reward for t, reward in enumerate(made.step_rewards))
            assert earned == pytest.approx(made.reward, rel=1e-6)
            assert first.step_rewards.tolist() == [first.reward]
    assert lengths == {1, 2, 3}


def test_siblings_of_one_horizon_differ_by_their_first_action_alone() -> None:
    groups = sample(sampler_on(COUNTING, horizon=1, spread=0.0, starts=12))
    for group in groups:
        (made,) = {rollout.context[0, 2] for rollout in group.rollouts}
        for rollout in group.rollouts:
            assert rollout.reward == made + 1 + 100 * (rollout.actions[0] == 2)
    assert len({rollout.actions[0] for group in groups for rollout in group.rollouts}) == 3


def test_siblings_share_their_state_and_go_their_own_ways() -> None:
    groups = sample(sampler_on(toy_envs.TARGET))
    for group in groups:
        assert len({rollout.context[0].tobytes() for rollout in group.rollouts}) == 1
        assert len({rollout.actions.tobytes() for rollout in group.rollouts}) == SIZE
    again = sample(sampler_on(toy_envs.TARGET))
    other = sample(sampler_on(toy_envs.TARGET, seed=SEED + 1))
    rewards = [[rollout.reward for group in made for rollout in group.rollouts] for made in (groups, again, other)]
    assert rewards[0] == rewards[1] != rewards[2]


@pytest.mark.slow
def test_every_state_of_an_episode_is_as_likely() -> None:
    """Chi-square over 1,200 episodes of two to six states; a fixed seed, so it passes or fails once and for all."""
    sampler = sampler_on(COUNTING, starts=150, size=2, horizon=1)
    counts: dict[int, np.ndarray] = {length: np.zeros(length) for length in range(2, 7)}
    for step in range(1, 9):
        for group in sample(sampler, step):
            _, length, made = group.rollouts[0].context[0]
            counts[int(length)][int(made)] += 1
    statistic = freedom = 0.0
    for length, count_L in counts.items():
        assert count_L.sum() > 150
        expected = count_L.sum() / length
        statistic += float(((count_L - expected) ** 2 / expected).sum())
        freedom += length - 1
    # Wilson and Hilferty (1931): the cube root of chi-square over its freedom is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 3, counts


def test_what_was_used_of_the_environment_is_counted() -> None:
    """The episodes and the branches; the rest of finished slots costs nothing."""
    sampler = sampler_on(COUNTING)
    used = 0
    for step in (1, 2):
        for group in sample(sampler, step):
            used += int(group.rollouts[0].context[0, 1])
            used += sum(int(rollout.text.split()[0]) for rollout in group.rollouts)
    assert sampler.counters() == {"environment/steps": used, "environment/episodes": 2 * STARTS}


def test_what_branches_saw_moves_the_scale_of_observations() -> None:
    environments, trunks = toy_envs.made("CartPole-v1", 4), toy_envs.made("CartPole-v1", 2)
    policy = toy_envs.policy_for(environments, normalised=True)
    sampler = BranchSampler(policy, environments, SEED, RewardScale(), GAMMA, trunks=trunks, horizon=5, decisions=1)
    batch = collate(sample(sampler))
    assert policy.normaliser.count == 0
    assert torch.allclose(policy.evaluate(batch).logprobs_BT, batch.behavior_logprobs_BT, atol=1e-5)
    sampler.refresh(1)
    assert policy.normaliser.count > len(batch)


def test_a_branch_whose_environment_failed_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_on(toy_envs.ENDLESS, spread=0.0)
    step, failed_N = sampler.environments.step, np.arange(STARTS * SIZE) == 6

    def fails(actions: np.ndarray) -> Step:
        result = step(actions)
        return replace(result, truncated_N=result.truncated_N | failed_N, failed_N=failed_N)

    monkeypatch.setattr(sampler.environments, "step", fails)
    rollouts = [rollout for group in sample(sampler) for rollout in group.rollouts]
    assert [slot for slot, rollout in enumerate(rollouts) if rollout.reward is None] == [6]
    assert rollouts[6].text == "1 step, its environment failed"
