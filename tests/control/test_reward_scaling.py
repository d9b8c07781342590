"""The scale of rewards: what the running deviation is taken over, and what it does to rewards and scores."""

import numpy as np
import pytest

from covey.control.sampler import (
    BranchSampler,
    ClipReward,
    EpisodeSampler,
    FragmentSampler,
    ResetSeeds,
    RewardScale,
    RunningStdScaling,
)
from covey.data import EndReason, Group
from helpers import toy_envs
from helpers.counting_environment import COUNTING

GAMMA = 0.9


def by_hand(episodes: list[list[float]]) -> np.ndarray:
    """Forward-discounted returns of whole episodes, one after another."""
    returns = []
    for rewards in episodes:
        total = 0.0
        for reward in rewards:
            total = GAMMA * total + reward
            returns.append(total)
    return np.array(returns)


def everything(shape: tuple[int, int]) -> np.ndarray:
    return np.ones(shape, dtype=bool)


def test_divided_by_the_deviation_of_the_running_return() -> None:
    scale = RunningStdScaling(GAMMA)
    rewards_NT = np.array([[1.0, 2.0, -3.0], [4.0, 0.0, 5.0]])
    ended_NT = np.array([[False, True, False], [False, False, False]])
    scaled_NT = scale.scale(rewards_NT, ended_NT, everything((2, 3)))
    expected = by_hand([[1.0, 2.0], [-3.0], [4.0, 0.0, 5.0]])
    np.testing.assert_allclose(scaled_NT, rewards_NT / expected.std())
    # The two episodes that were not over go on in the next step.
    again_NT = scale.scale(np.array([[7.0], [8.0]]), everything((2, 1)), everything((2, 1)))
    expected = by_hand([[1.0, 2.0], [-3.0, 7.0], [4.0, 0.0, 5.0, 8.0]])
    np.testing.assert_allclose(again_NT, np.array([[7.0], [8.0]]) / expected.std())
    assert scale.std == pytest.approx(expected.std())


def test_entries_that_are_no_decisions_count_nothing() -> None:
    """A slot that rests earns nothing; taking its zeros for returns would shrink the scale."""
    scale, alone = RunningStdScaling(GAMMA), RunningStdScaling(GAMMA)
    counted_NT = np.array([[True, True, True, True], [True, True, False, False]])
    ended_NT = np.array([[False, False, False, True], [False, True, False, False]])
    rewards_NT = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 0.0, 0.0]])
    scale.scale(rewards_NT, ended_NT, counted_NT)
    assert scale.std == pytest.approx(by_hand([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0]]).std())
    alone.scale(rewards_NT, ended_NT, everything((2, 4)))
    assert alone.std != pytest.approx(scale.std, rel=0.01)


def test_cut_to_ten_deviations() -> None:
    scale = RunningStdScaling(GAMMA)
    rewards_NT = np.zeros((1, 400))
    rewards_NT[0, [7, 300]] = 1000.0, -1000.0
    scaled_NT = scale.scale(rewards_NT, everything((1, 400)), everything((1, 400)))
    assert sorted(set(scaled_NT[0].tolist())) == [-10.0, 0.0, 10.0]


def test_rewards_that_are_all_alike_stay_finite() -> None:
    scaled_NT = RunningStdScaling(0.0).scale(np.ones((1, 5)), everything((1, 5)), everything((1, 5)))
    assert np.isfinite(scaled_NT).all()


def test_the_running_scale_is_saved_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    first, second = RunningStdScaling(GAMMA), RunningStdScaling(GAMMA)
    ended_NT = rng.random((3, 20)) < 0.2
    first.scale(rng.normal(size=(3, 20)), ended_NT, everything((3, 20)))
    second.load_state_dict(first.state_dict())
    later_NT = rng.normal(size=(3, 20))
    expected_NT = first.scale(later_NT, ended_NT, everything((3, 20)))
    assert second.scale(later_NT, ended_NT, everything((3, 20))).tobytes() == expected_NT.tobytes()


def test_clipped_and_as_paid() -> None:
    rewards_NT = np.array([[-7.0, 0.5, 3.0]])
    whole = everything((1, 3))
    assert ClipReward().scale(rewards_NT, whole, whole).tolist() == [[-1.0, 0.5, 1.0]]
    assert RewardScale().scale(rewards_NT, whole, whole).tolist() == [[-7.0, 0.5, 3.0]]


def rollouts_of(groups: list[Group]) -> list:
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("slots", [12, 5])
def test_episodes_scale_by_their_own_returns(slots: int) -> None:
    """However many slots there are, and however long some of them rest. Scores stay as they were paid."""
    environments = toy_envs.made(COUNTING, slots)
    scale = RunningStdScaling(GAMMA)
    sampler = EpisodeSampler(toy_envs.policy_for(environments), environments, 3, scale, GAMMA)
    paid = []
    for step in (1, 2):
        rollouts = rollouts_of(sampler.sample(ResetSeeds().draw(3, step, 4), 3, step))
        for rollout in rollouts:
            made_T = rollout.context[1:, 2]
            paid.append((made_T + 100 * (rollout.actions == 2)).tolist())
            assert rollout.score == sum(paid[-1])
        assert scale.std == pytest.approx(by_hand(paid).std())
        for rollout, rewards in zip(rollouts, paid[-12:], strict=True):
            np.testing.assert_allclose(rollout.step_rewards, np.array(rewards) / scale.std)


def test_fragments_scale_by_the_returns_of_whole_episodes() -> None:
    """The forward return goes on over the ends of fragments, and no reset counts as a step."""
    environments = toy_envs.made(COUNTING, 3)
    scale = RunningStdScaling(GAMMA)
    sampler = FragmentSampler(toy_envs.policy_for(environments), environments, 3, scale, GAMMA, steps=4)
    paid: list[list[list[float]]] = [[[]], [[]], [[]]]  # slot, episode, step
    for step in range(1, 6):
        for slot, group in enumerate(sampler.sample(ResetSeeds().draw(3, step, 3), 1, step)):
            for rollout in group.rollouts:
                paid[slot][-1] += (rollout.context[1:, 2] + 100 * (rollout.actions == 2)).tolist()
                if rollout.end is not EndReason.CUT:
                    paid[slot].append([])
        assert scale.std == pytest.approx(by_hand([episode for slot in paid for episode in slot]).std())


def test_a_branch_that_was_cut_does_not_go_on_in_the_next_step() -> None:
    """Endless pays 1 a step: every branch of two steps has the returns 1 and 1.9, in the first step and in all."""
    environments, trunks = (toy_envs.made(toy_envs.ENDLESS, count, copies_states=True) for count in (6, 2))
    scale = RunningStdScaling(GAMMA)
    policy = toy_envs.policy_for(environments)
    sampler = BranchSampler(policy, environments, 3, scale, GAMMA, trunks=trunks, horizon=2, decisions=1)
    lengths = []
    for step in range(1, 6):
        rollouts = rollouts_of(sampler.sample(ResetSeeds().draw(3, step, 2), 3, step))
        lengths += [int(rollout.text.split()[0]) for rollout in rollouts]
        assert scale.std == pytest.approx(by_hand([[1.0] * length for length in lengths]).std())
        for rollout, length in zip(rollouts, lengths[-6:], strict=True):
            assert rollout.reward == pytest.approx((1 + GAMMA * (length - 1)) / scale.std)
            assert rollout.reward < 10
    assert lengths.count(2) > 15
