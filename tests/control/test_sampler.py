"""Whole episodes: groups from one start, rollouts that depend on nothing but what names them, the scales of rewards."""

from typing import Any

import numpy as np
import pytest

from covey.control.envs.vector_env import Environments, Step
from covey.control.policy import ControlPolicy
from covey.control.rollout_buffer import ActionRng, collect_episodes
from covey.control.sampler import (
    BranchSampler,
    ClipReward,
    EpisodeSampler,
    FragmentSampler,
    ResetSeeds,
    RewardScale,
    RunningStdScaling,
    reset_seeds,
)
from covey.data import EndReason, Group, Rollout, collate
from covey.runtime.rng import SAMPLING, uniforms
from helpers import toy_envs
from helpers.contracts import TaskContract
from helpers.counting_environment import COUNTING

SEED, STARTS, SIZE = 11, 3, 4
NAMES = ["CartPole-v1", toy_envs.NOISY, toy_envs.TARGET, COUNTING]


def sample(
    environments: Any, step: int = 1, seed: int = SEED, policy: ControlPolicy | None = None, starts: int = STARTS
) -> list[Group]:
    policy = policy or toy_envs.policy_for(environments, spread=1.0)
    sampler = EpisodeSampler(policy, environments, seed, RewardScale(), 1.0)
    return sampler.sample(ResetSeeds().draw(seed, step, starts), SIZE, step)


def rollouts_of(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def assert_same(groups: list[Group], others: list[Group]) -> None:
    """The same rollouts. Log-probabilities may differ in the last bits: products of more rows are summed otherwise."""
    assert [group.start for group in groups] == [group.start for group in others]
    for one, other in zip(rollouts_of(groups), rollouts_of(others), strict=True):
        np.testing.assert_allclose(one.actions, other.actions, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one.context, other.context, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one.behavior_logprobs, other.behavior_logprobs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one.step_rewards, other.step_rewards, rtol=1e-4, atol=1e-5)
        assert (one.end, one.text) == (other.end, other.text)


@pytest.mark.parametrize("name", NAMES)
def test_four_rollouts_are_two_and_two_more(name: str) -> None:
    environments = toy_envs.made(name, 3)
    sampler = EpisodeSampler(toy_envs.policy_for(environments, spread=1.0), environments, SEED, RewardScale(), 1.0)
    starts = ResetSeeds().draw(SEED, 1, STARTS)
    whole = sampler.sample(starts, 4, 1)
    assert_same(sampler.sample(starts, 2, 1), [Group(group.start, group.rollouts[:2]) for group in whole])
    assert_same(sampler.sample(starts[1:], 2, 1, 2), [Group(group.start, group.rollouts[2:]) for group in whole[1:]])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_fewer_copies_than_rollouts_play_the_same_rollouts(name: str) -> None:
    whole = sample(toy_envs.made(name, STARTS * SIZE))
    for count in (1, 2, 5, 20):
        assert_same(sample(toy_envs.made(name, count)), whole)


class Shuffled:
    """The same copies in another order: episodes are played in other slots."""

    def __init__(self, inner: Environments, order: list[int]) -> None:
        self._inner = inner
        self._to = np.array(order)  # the slot that the policy sees -> the copy behind it
        self._back = np.argsort(self._to)
        self.count, self.actions, self.observation_size = inner.count, inner.actions, inner.observation_size
        self.masked = inner.masked

    def reset(self, seeds: list[int]) -> Any:
        return self._inner.reset([seeds[slot] for slot in self._back])[self._to]

    def reset_slots(self, slots: Any, seeds: list[int]) -> Any:
        copies = self._to[slots]
        order = np.argsort(copies)
        answer_KD = np.empty((len(slots), self.observation_size), dtype=np.float32)
        answer_KD[order] = self._inner.reset_slots(copies[order], [seeds[i] for i in order])
        return answer_KD

    def step(self, actions: Any) -> Step:
        step = self._inner.step(actions[self._back])
        return Step(*(getattr(step, name)[self._to] for name in Step.__slots__ if name != "failed_N"))


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_copies_changes_nothing(name: str) -> None:
    shuffled = Shuffled(toy_envs.made(name, 5), [3, 0, 4, 1, 2])
    assert_same(sample(shuffled), sample(toy_envs.made(name, 5)))


def test_how_copies_step_together_changes_nothing() -> None:
    whole = sample(toy_envs.made("CartPole-v1", 12))
    for kind in ("sync", "async"):
        environments = toy_envs.made("CartPole-v1", 4, vectorization=kind)
        assert_same(sample(environments), whole)
        environments.close()


def test_more_starts_leave_the_first_ones_alone() -> None:
    few, many = (sample(toy_envs.made("CartPole-v1", 8), starts=starts) for starts in (2, 5))
    assert_same(many[:2], few)


@pytest.mark.parametrize("name", ["CartPole-v1", toy_envs.TARGET])
def test_seed_step_start_and_rollout_all_matter(name: str) -> None:
    def seen(groups: list[Group]) -> list[bytes]:
        return [rollout.context.tobytes() + rollout.actions.tobytes() for rollout in rollouts_of(groups)]

    environments = toy_envs.made(name, 12)
    first = sample(environments)
    assert len(set(seen(first))) == STARTS * SIZE, "siblings and groups go their own ways"
    assert seen(sample(environments)) == seen(first), "the same again"
    for other in (sample(environments, step=2), sample(environments, seed=SEED + 1)):
        assert not set(seen(other)) & set(seen(first))


def test_siblings_begin_in_the_same_state_groups_in_others() -> None:
    groups = sample(toy_envs.made("CartPole-v1", 12))
    firsts = [{rollout.context[0].tobytes() for rollout in group.rollouts} for group in groups]
    assert [len(first) for first in firsts] == [1] * STARTS
    assert len(set.union(*firsts)) == STARTS


def test_actions_come_from_the_numbers_of_their_own_decision() -> None:
    """Replayed one decision at a time from (seed, step, group, rollout, position)."""
    environments = toy_envs.made("CartPole-v1", 5)
    policy = toy_envs.policy_for(environments, spread=0.0)  # evenly undecided
    for group_index, group in enumerate(sample(environments, step=4, policy=policy)):
        for index, rollout in enumerate(group.rollouts):
            drawn = uniforms(SEED, 4, group_index, index, np.arange(len(rollout.actions)), stream=SAMPLING)
            assert rollout.actions.tolist() == (drawn >= 0.5).astype(int).tolist()


def test_numbers_drawn_ahead_are_those_of_their_positions() -> None:
    draws = ActionRng(7, 3, [(5, 6), (8, 9)], numbers=2, stream=SAMPLING)
    drawn = np.stack([draws.next() for _ in range(150)])
    for slot, (group, rollout) in enumerate([(5, 6), (8, 9)]):
        expected = uniforms(7, 3, group, rollout, np.arange(300)).reshape(150, 2)
        assert drawn[:, slot].tolist() == expected.tolist()
    draws.begin(0, group=1, rollout=1)  # in the middle of what was drawn ahead
    assert draws.next()[0].tolist() == uniforms(7, 3, 1, 1, np.arange(2)).tolist()


def test_every_rollout_is_one_whole_episode() -> None:
    """Rows of the batch, entry by entry, with fewer copies than episodes."""
    groups = sample(toy_envs.made(COUNTING, 5))
    batch = collate(groups)
    for row, rollout in enumerate(rollouts_of(groups)):
        name, length, first = rollout.context[0]
        assert first == 0
        assert len(rollout.actions) == length
        assert rollout.context.tolist() == [[name, length, made] for made in range(int(length) + 1)]
        paid_T = np.arange(1, length + 1) + 100 * (rollout.actions == 2)
        assert batch.rewards_BT[row, : int(length)].tolist() == paid_T.tolist()
        assert float(batch.reward_B[row]) == rollout.score == paid_T.sum()
        assert rollout.end is EndReason.TERMINATED
        assert rollout.text == f"{int(length)} steps, terminated"
    assert batch.mask_BT.sum(dim=1).tolist() == [len(rollout.actions) for rollout in rollouts_of(groups)]
    assert not batch.truncated_B.any()


def test_time_limits_and_deaths_are_told_apart() -> None:
    environments = toy_envs.made(COUNTING, 5, max_episode_steps=3)
    rollouts = rollouts_of(sample(environments, starts=8))
    for rollout in rollouts:
        limited = rollout.context[0, 1] > 3
        assert rollout.end is (EndReason.TRUNCATED if limited else EndReason.TERMINATED)
        assert len(rollout.actions) == min(rollout.context[0, 1], 3)
    assert len({rollout.end for rollout in rollouts}) == 2


def test_the_reward_is_the_discounted_return_and_the_score_the_plain_one() -> None:
    environments = toy_envs.made(COUNTING, 12)
    sampler = EpisodeSampler(toy_envs.policy_for(environments), environments, SEED, RewardScale(), 0.5)
    for rollout in rollouts_of(sampler.sample(ResetSeeds().draw(SEED, 1, STARTS), SIZE, 1)):
        assert rollout.score == sum(rollout.step_rewards)
        assert rollout.reward == pytest.approx(sum(0.5**t * r for t, r in enumerate(rollout.step_rewards)))


def test_what_was_used_of_the_environment_is_counted() -> None:
    environments = toy_envs.made(COUNTING, 4, action_repeat=2)
    sampler = EpisodeSampler(toy_envs.policy_for(environments), environments, SEED, RewardScale(), 1.0)
    steps = 0
    for step in (1, 2):
        rollouts = rollouts_of(sampler.sample(ResetSeeds().draw(SEED, step, STARTS), SIZE, step))
        steps += sum(int(rollout.context[0, 1]) for rollout in rollouts)
    assert sampler.counters() == {"environment/steps": steps, "environment/episodes": 2 * STARTS * SIZE}
    again = EpisodeSampler(sampler.policy, environments, SEED, RewardScale(), 1.0)
    again.load_state_dict(sampler.state_dict())
    assert again.counters() == sampler.counters()


def test_greedy_play_takes_the_best_action_and_no_random_number() -> None:
    environments = toy_envs.made("CartPole-v1", 3)
    policy = toy_envs.policy_for(environments)
    seeds = reset_seeds(0, 0, np.arange(7), 0)
    segments, buffer = collect_episodes(environments, policy, seeds, None)
    others, other_tape = collect_episodes(toy_envs.made("CartPole-v1", 7), policy, seeds, None)
    for segment, other in zip(segments, others, strict=True):
        rollout = buffer.rollout(segment, 0)
        assert rollout.context.tolist() == other_tape.rollout(other, 0).context.tolist()
        for observation_D, action in zip(rollout.context[:-1], rollout.actions, strict=True):
            assert policy.greedy_action(observation_D[None])[0] == action


class TestResetSeeds(TaskContract):
    @pytest.fixture
    def task(self) -> ResetSeeds:
        return ResetSeeds()

    def test_seeds_are_those_that_every_environment_takes(self, task: ResetSeeds) -> None:
        assert all(0 <= start.prompt < 2**31 for start in (*task.draw(0, 1, 50), *task.held_out(50)))


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


def scaled_rollouts(groups: list[Group]) -> list:
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("slots", [12, 5])
def test_episodes_scale_by_their_own_returns(slots: int) -> None:
    """However many slots there are, and however long some of them rest. Scores stay as they were paid."""
    environments = toy_envs.made(COUNTING, slots)
    scale = RunningStdScaling(GAMMA)
    sampler = EpisodeSampler(toy_envs.policy_for(environments), environments, 3, scale, GAMMA)
    paid = []
    for step in (1, 2):
        rollouts = scaled_rollouts(sampler.sample(ResetSeeds().draw(3, step, 4), 3, step))
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
        rollouts = scaled_rollouts(sampler.sample(ResetSeeds().draw(3, step, 2), 3, step))
        lengths += [int(rollout.text.split()[0]) for rollout in rollouts]
        assert scale.std == pytest.approx(by_hand([[1.0] * length for length in lengths]).std())
        for rollout, length in zip(rollouts, lengths[-6:], strict=True):
            assert rollout.reward == pytest.approx((1 + GAMMA * (length - 1)) / scale.std)
            assert rollout.reward < 10
    assert lengths.count(2) > 15
