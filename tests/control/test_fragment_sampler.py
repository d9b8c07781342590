"""Fragments: every row of the batch is a piece of one episode, episodes go on over the ends of fragments."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from covey.control.envs.vector_env import Environments
from covey.control.policy import ControlCritic
from covey.control.sampler import FragmentSampler, ResetSeeds, RewardScale
from covey.data import Batch, EndReason, Group, collate
from helpers import toy_envs
from helpers.counting_environment import COUNTING

SLOTS, STEPS, ROUNDS = 3, 7, 6


def counting(kind: str = "sync", **more: int) -> Environments:
    return toy_envs.made(COUNTING, SLOTS, vectorization=kind, **more)


@pytest.fixture(params=["sync", "async"])
def environments(request: pytest.FixtureRequest) -> Iterator[Environments]:
    made = counting(request.param)
    yield made
    made.close()


def sampler_of(environments: Environments, steps: int = STEPS, seed: int = 5) -> FragmentSampler:
    policy = toy_envs.policy_for(environments, spread=0.0)  # every action as likely as any other
    return FragmentSampler(policy, environments, seed, RewardScale(), 0.9, steps=steps)


def sample(sampler: FragmentSampler, step: int) -> list[Group]:
    count = sampler.environments.count
    return sampler.sample(ResetSeeds().draw(sampler.seed, step, count), 1, step)


def check_rows(batch: Batch) -> None:
    """Consecutive observations of one episode, and for each step the reward that it paid."""
    for row, context in enumerate(batch.context):
        decided = int(batch.mask_BT[row].sum())
        assert batch.mask_BT[row, :decided].all()
        assert context.shape == (decided + 1, 3)
        name, length, first = context[0]
        assert first < length, "a row must not begin in a state that is over"
        for made in range(decided + 1):
            assert context[made].tolist() == [name, length, first + made]
        bonus_T = 100.0 * (batch.actions_BT[row, :decided] == 2)
        paid_T = first + 1 + torch.arange(decided) + bonus_T
        assert batch.rewards_BT[row, :decided].tolist() == paid_T.tolist()
        assert not batch.rewards_BT[row, decided:].any()
        discounted = sum(0.9**t * float(paid_T[t]) for t in range(decided))
        assert float(batch.reward_B[row]) == pytest.approx(discounted)


def test_no_reset_step_enters_a_batch(environments: Environments) -> None:
    """Over several training steps: each slot's rows, put together, are whole episodes in order."""
    sampler = sampler_of(environments)
    going_on: list[list[float] | None] = [None] * SLOTS  # the state that each slot's last row left open
    played = [0.0] * SLOTS
    ends = decisions = resets = 0
    for step in range(1, ROUNDS + 1):
        groups = sample(sampler, step)
        batch = collate(groups)
        check_rows(batch)
        assert len(batch) == sum(len(group.rollouts) for group in groups)
        for slot, group in enumerate(groups):
            for rollout in group.rollouts:
                name, length, made = rollout.context[0].tolist()
                if going_on[slot] is None:
                    assert made == 0, "an episode begins at its beginning"
                else:
                    assert going_on[slot] == [name, length, made]
                played[slot] += sum(rollout.step_rewards)
                over = rollout.context[-1, 1] == rollout.context[-1, 2]
                assert rollout.end is (EndReason.TERMINATED if over else EndReason.CUT)
                going_on[slot] = None if over else rollout.context[-1].tolist()
                if over:
                    assert rollout.score == played[slot], "the score is the whole episode's return"
                    played[slot], ends = 0.0, ends + 1
                else:
                    assert rollout is group.rollouts[-1], "only the end of the fragment cuts"
                    assert rollout.score is None
            made_steps = sum(len(rollout.actions) for rollout in group.rollouts)
            decisions += made_steps
            resets += STEPS - made_steps
        assert batch.truncated_B.tolist() == [r.end is EndReason.CUT for group in groups for r in group.rollouts]
    assert ends > 10
    assert sampler.counters() == {"environment/steps": decisions, "environment/episodes": ends}
    assert resets == 0, "a reset takes no step of a fragment"


def test_limits_and_deaths_are_told_apart() -> None:
    """A limit of 3 steps: shorter episodes terminate, longer are truncated, those of 3 do both and so are over."""
    sampler = sampler_of(counting(max_episode_steps=3))
    seen = set()
    for step in range(1, ROUNDS + 1):
        groups = sample(sampler, step)
        check_rows(collate(groups))
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            _, length, made = rollout.context[-1]
            expected = EndReason.TERMINATED if made == length else EndReason.TRUNCATED if made == 3 else EndReason.CUT
            assert rollout.end is expected
            assert (rollout.score is None) == (rollout.end is EndReason.CUT)
            seen.add((rollout.end, min(length, 4)))
    assert {(EndReason.TERMINATED, 2), (EndReason.TERMINATED, 3), (EndReason.TRUNCATED, 4)} <= seen
    assert EndReason.CUT in {end for end, _ in seen}


def test_held_actions_are_one_decision() -> None:
    sampler = sampler_of(counting(action_repeat=2))
    raw = 0
    for step in range(1, ROUNDS + 1):
        for group in sample(sampler, step):
            for rollout in group.rollouts:
                made_T = rollout.context[:, 2]
                length = rollout.context[0, 1]
                expected_T = np.minimum(made_T[0] + 2 * np.arange(len(made_T)), length)
                assert made_T.tolist() == expected_T.tolist()
                raw += made_T[-1] - made_T[0]
    assert sampler.counters()["environment/steps"] == raw


def test_a_critic_is_asked_about_the_state_after_the_last_decision(environments: Environments) -> None:
    """Also where the environment has already reset: the episode's own last observation, not the next one's first."""
    sampler = sampler_of(environments)
    sample(sampler, 1)
    batch = collate(sample(sampler, 2))
    critic = ControlCritic(3, hidden=(4,), normaliser=None, seed=0)
    last_BD = torch.tensor(np.stack([context[-1] for context in batch.context]))
    torch.testing.assert_close(critic.bootstrap_values(batch), critic.module(last_BD)[:, 0].detach())


def test_fragments_depend_on_their_slot_alone() -> None:
    """The first three of five slots do what three do alone; another seed does something else."""
    few, many, other = (
        sampler_of(toy_envs.made("CartPole-v1", count), steps=40, seed=seed) for count, seed in ((3, 5), (5, 5), (3, 6))
    )
    for step in range(1, 4):
        expected, same, different = (sample(sampler, step) for sampler in (few, many, other))
        assert described(same[:3]) == described(expected)
        assert described(different) != described(expected)
    assert few.episodes > 0


def test_the_policy_that_sampled_is_the_one_that_learns() -> None:
    """The scale of observations stands still during a step and moves at its end, by what the step saw."""
    environments = toy_envs.made("CartPole-v1", 4)
    policy = toy_envs.policy_for(environments, normalised=True)
    sampler = FragmentSampler(policy, environments, 1, RewardScale(), 0.9, steps=30)
    seen = []
    for step in range(1, 4):
        groups = sample(sampler, step)
        batch = collate(groups)
        gap_BT = (policy.evaluate(batch).logprobs_BT - batch.behavior_logprobs_BT)[batch.mask_BT]
        assert float(gap_BT.abs().max().detach()) < 1e-5
        before = policy.normaliser.mean_D
        seen += batch.context
        assert all(rollout.version == step - 1 for group in groups for rollout in group.rollouts)
        sampler.refresh(step)
        assert (policy.normaliser.mean_D != before).any()
    everything_ND = np.concatenate(seen).astype(np.float64)
    np.testing.assert_allclose(policy.normaliser.mean_D, everything_ND.mean(axis=0))
    np.testing.assert_allclose(policy.normaliser.var_D, everything_ND.var(axis=0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["CartPole-v1", toy_envs.TARGET, toy_envs.NOISY])
def test_episodes_that_were_going_on_are_brought_back(name: str) -> None:
    """What was saved after some steps goes on in a fresh sampler as in the one that was never stopped."""
    first = sampler_of(toy_envs.made(name, 4), steps=17)
    for step in range(1, 4):
        sample(first, step)
    for step in range(4, 9):
        second = sampler_of(toy_envs.made(name, 4), steps=17)
        second.load_state_dict(first.state_dict())
        assert second.counters() == first.counters()
        assert described(sample(second, step)) == described(sample(first, step))
        assert second.counters() == first.counters()
        first = second  # the next is saved by one that was brought back itself


def described(groups: list[Group]) -> list[list[tuple]]:
    return [
        [
            (
                r.context.tobytes(),
                r.actions.tolist(),
                r.behavior_logprobs.tolist(),
                list(r.step_rewards),
                r.score,
                r.end,
            )
            for r in group.rollouts
        ]
        for group in groups
    ]
