"""Credit for single decisions, the critic, KL to the policy that acted: by hand, from the formulas, however cut."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from covey.algorithms import Algorithm, KLInLoss, KLInReward, KLPenalty, KLToBehavior, grpo, ppo, rloo
from covey.algorithms.advantages import outcome, reward_to_go, reward_to_go_by_step, within_episode
from covey.config import ConfigError
from covey.core import kl, schedules
from covey.core.baselines import group_centered, group_zscore
from covey.data import Batch, Group, collate
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.credits import (
    REFERENCE_SEED,
    episode,
    gradient_of,
    gradients,
    group,
    kl_by_hand,
    moved,
    random_episodes,
    ready,
)
from helpers.gradients import same
from helpers.tabular_policy import PlainDescent, Recorder, ToyCritic, ToyPolicy
from helpers.updates import one_update

NO_KL = KLPenalty()
KL_COEFFICIENT = 0.3
CREDITS = {
    "outcome": outcome,
    "reward_to_go": partial(reward_to_go, gamma=0.9),
    "reward_to_go_by_step": partial(reward_to_go_by_step, gamma=0.9),
    "within_episode": partial(within_episode, gamma=0.9),
}
TO_BEHAVIOR = KLPenalty(schedules.constant(KL_COEFFICIENT), KLToBehavior(kl.exact))
ALGORITHMS = {
    **{name: grpo(kl=NO_KL, credit=credit) for name, credit in CREDITS.items()},
    "rloo": rloo(kl=NO_KL, credit=CREDITS["reward_to_go_by_step"]),
    "entropy_and_kl": grpo(kl=TO_BEHAVIOR, entropy_coefficient=0.05, credit=CREDITS["within_episode"]),
    "ppo": ppo(),
    "ppo_with_all": ppo(
        value_clip=0.2, entropy_coefficient=0.05, kl=KLPenalty(schedules.constant(0.3), KLInReward(kl.k1))
    ),
}
EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


def advantages(estimate, *groups: Group) -> list[list[float]]:
    return estimate(collate(list(groups))).advantages_BT.tolist()


# --- what is compared with what ---


def test_outcome_by_hand():
    # sums 6 and 2, mean 4: every decision of a rollout shares its advantage, padding has none
    assert advantages(outcome(group_centered), group(episode([1, 2, 3]), episode([0, 2]))) == [[2, 2, 2], [-2, -2, 0]]


# gamma 1/2: returns 2.75 3.5 3 and 1 2; in the other group 4 and 8
TWO_GROUPS = (group(episode([1, 2, 3]), episode([0, 2])), group(episode([4]), episode([8]), index=1))


def test_reward_to_go_by_step_by_hand():
    # steps of the first group: mean 1.875, mean 2.75, a decision alone; of the second: mean 6
    found = advantages(reward_to_go_by_step(group_centered, gamma=0.5), *TWO_GROUPS)
    assert found == [[0.875, 0.75, 0], [-0.875, -0.75, 0], [-2, 0, 0], [2, 0, 0]]


def test_reward_to_go_by_hand():
    # (2.75 + 3.5 + 3 + 1 + 2) / 5 = 2.45
    found = advantages(reward_to_go(group_centered, gamma=0.5), *TWO_GROUPS)
    for made, expected in zip(found, [[0.3, 1.05, 0.55], [-1.45, -0.45, 0], [-2, 0, 0], [2, 0, 0]], strict=True):
        assert made == pytest.approx(expected, abs=1e-6)


def test_within_episode_by_hand():
    # each row with its own mean: 9.25/3 and 1.5; a single decision has nothing to be compared with
    found = advantages(within_episode(group_centered, gamma=0.5), *TWO_GROUPS)
    assert found[0] == pytest.approx([2.75 - 9.25 / 3, 3.5 - 9.25 / 3, 3 - 9.25 / 3], abs=1e-6)
    assert found[1:] == [[-0.5, 0.5, 0], [0, 0, 0], [0, 0, 0]]


def test_a_rollout_that_ended_early_is_not_compared_at_later_steps():
    long, other, short = episode([1, 2, 3, 4]), episode([4, 3, 5, 1]), episode([9, 9])
    estimate = reward_to_go_by_step(group_zscore, gamma=0.9)
    with_it = advantages(estimate, group(long, short, other))
    without = advantages(estimate, group(long, other))
    assert [with_it[0][2:], with_it[2][2:]] == [without[0][2:], without[1][2:]]
    assert with_it[1][2:] == [0, 0]
    assert with_it[0][:2] != without[0][:2]


def test_siblings_that_earn_the_same_from_here_on_teach_nothing_here():
    batch, metrics = ready(
        [group(episode([1, 2]), episode([5, 2]))], grpo(kl=NO_KL, credit=CREDITS["reward_to_go_by_step"])
    )
    assert batch.advantages_BT is not None
    assert batch.advantages_BT[:, 1].tolist() == [0, 0]
    assert metrics["groups/zero_advantage_fraction"] == 0
    _, metrics = ready(
        [group(episode([1, 2]), episode([1, 2]))], grpo(kl=NO_KL, credit=CREDITS["reward_to_go_by_step"])
    )
    assert metrics["groups/zero_advantage_fraction"] == 1
    assert metrics["update/rows"] == 0


def test_a_kl_acts_if_a_step_has_a_coefficient():
    late = KLPenalty(lambda step: float(step > 2))
    assert [late.acts_within(steps) for steps in (0, 2, 3)] == [False, False, True]
    assert not NO_KL.acts_within(100)


def test_the_kl_is_taken_off_the_decisions_that_it_was_measured_at():
    algorithm = rloo(kl=KLPenalty(schedules.constant(0.5), KLInReward(kl.k1)), credit=CREDITS["reward_to_go"])
    groups = [group(episode([1, 2]), episode([3]))]
    batch, _ = ready(groups, algorithm)
    known = ToyPolicy(seed=REFERENCE_SEED).evaluate(collate(groups)).logprobs_BT.detach()
    penalty = 0.5 * (-1 - known)
    expected = collate(groups).rewards_BT - penalty * collate(groups).mask_BT
    torch.testing.assert_close(batch.rewards_BT.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(batch.reward_B.double(), expected.sum(dim=1), rtol=0, atol=1e-6)


# --- how a step is laid out and cut does not change it ---


@EVERY
def test_permutation_of_rows(algorithm):
    batch = collate(random_episodes())
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    same(gradient_of(batch.select(order), algorithm), gradient_of(batch, algorithm))


@EVERY
@pytest.mark.parametrize("hidden", [0.0, math.nan])
def test_what_stands_at_padding_is_never_read(algorithm, hidden):
    batch = collate(random_episodes())
    spoiled = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, 2))
        for name in ("actions_BT", "mask_BT", "behavior_logprobs_BT", "rewards_BT")
    }
    for name in ("behavior_logprobs_BT", "rewards_BT"):
        spoiled[name][~spoiled["mask_BT"]] = hidden
    same(gradient_of(replace(batch, **spoiled), algorithm, padding=hidden), gradient_of(batch, algorithm))


@EVERY
@pytest.mark.parametrize("rows", [1, 4])
def test_microbatch_size(algorithm, rows):
    batch = collate(random_episodes())
    same(gradient_of(batch, algorithm, rows=rows), gradient_of(batch, algorithm))


@pytest.mark.sampled(6)
@EVERY
@pytest.mark.parametrize("minibatches", [3, 4])
def test_minibatches_of_single_decisions_sum_to_the_step(algorithm, minibatches):
    batch = collate(random_episodes())
    plan = UpdatePlan(minibatches=minibatches, single_decisions=True)
    actor, of_critic, metrics = gradients(batch, algorithm, plan=plan, rows=4)
    assert len(actor) == minibatches == metrics["update/optimizer_steps"]
    made = torch.cat([sum(part).flatten() / minibatches for part in (actor, of_critic) if part])
    same(made, gradient_of(batch, algorithm))
    whole = gradients(batch, algorithm)[2]
    for name in ("loss", "loss/value", "entropy", "kl/behavior", "clip/low", "clip/high", "ratio/max"):
        assert (name in metrics) == (name in whole), name
        assert metrics.get(name, 0.0) == pytest.approx(whole.get(name, 0.0), rel=1e-5), name


def test_a_decision_is_in_one_minibatch_and_the_order_depends_on_step_and_epoch():
    algorithm = ppo()
    batch, _ = ready(random_episodes(), algorithm)
    seen: list[Tensor] = []

    class Watching(ToyPolicy):
        def evaluate(self, part):
            seen.append(part.mask_BT.clone())
            return super().evaluate(part)

    for step in (1, 2, 1):
        plan = UpdatePlan(epochs=2, minibatches=3, single_decisions=True)
        policy, it = Watching(seed=1), ToyCritic()
        one_update(
            policy, Recorder(policy), algorithm, batch, plan, critic=it, critic_optimizer=Recorder(it), step=step
        )
    epochs = [torch.stack(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert len(epochs) == 6
    for parts in epochs:
        assert torch.equal(parts.sum(dim=0), batch.mask_BT.long())
        sizes = parts.sum(dim=(1, 2))
        assert int(sizes.max() - sizes.min()) <= 1
    assert torch.equal(torch.stack(epochs[:2]), torch.stack(epochs[4:]))
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epochs[2])


def test_more_minibatches_than_decisions_makes_no_empty_step():
    groups, algorithm = [group(episode([1, 2]), episode([3]))], ppo()
    actor, of_critic, metrics = gradients(groups, algorithm, plan=UpdatePlan(minibatches=5, single_decisions=True))
    assert len(actor) == len(of_critic) == metrics["update/optimizer_steps"] == 3
    made = torch.cat([sum(actor).flatten(), sum(of_critic).flatten()]) / 5
    same(made, gradient_of(groups, algorithm))


@EVERY
def test_failed_rollouts_change_nothing(algorithm):
    groups = random_episodes()
    expected = gradient_of(groups, algorithm)
    failed = episode([math.nan, 1e6, -1e6, 3.0, 1.0, 2.0, 3.0], context=1)
    failed.reward = None
    with_failures = copy.deepcopy(groups)
    for place, one in enumerate(with_failures):
        one.rollouts.insert(place, failed)
    with_failures.insert(1, group(failed))
    same(gradient_of(with_failures, algorithm), expected)


# --- KL to the policy that acted, entropy ---


def kl_of_loss(algorithm: Algorithm, batch: Batch) -> tuple[float, Tensor]:
    """What the KL adds to the loss of the moved policy, and to its gradient."""
    policy, without = moved(), moved()
    loss = algorithm.loss(policy.evaluate(batch), batch, 1.0).loss
    rest = algorithm.loss(without.evaluate(batch), batch, 0.0).loss
    loss.backward()
    rest.backward()
    assert policy.table.grad is not None
    assert without.table.grad is not None
    return (loss - rest).item(), policy.table.grad - without.table.grad


@pytest.mark.parametrize("to_behavior", [True, False], ids=["to_behavior", "to_reference"])
@pytest.mark.parametrize("estimator", ["exact", "k3"])
def test_kl_and_its_gradient_are_those_of_the_formula(estimator, to_behavior):
    placement = (KLToBehavior if to_behavior else KLInLoss)(getattr(kl, estimator))
    penalty = KLPenalty(schedules.constant(1.0), placement=placement)
    algorithm = grpo(kl=penalty)
    batch, _ = ready(random_episodes(count=2), algorithm)
    table = moved().table.tolist()
    other = ToyPolicy(seed=1 if to_behavior else REFERENCE_SEED).table.tolist()
    by_hand = partial(kl_by_hand, other=other, batch=batch, estimator=estimator, to_behavior=to_behavior)
    value, gradient = kl_of_loss(algorithm, batch)
    assert value == pytest.approx(by_hand(table), rel=1e-6)
    assert value > 0.03
    slope = torch.zeros_like(gradient)
    for place in gradient.nonzero().tolist():
        sides = []
        for move in (1e-5, -1e-5):
            row = table[place[0]][place[1]]
            row[place[2]] += move
            sides.append(by_hand(table))
            row[place[2]] -= move
        slope[tuple(place)] = (sides[0] - sides[1]) / 2e-5
    assert int((slope != 0).sum()) >= 40
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-6)


def test_an_exact_kl_in_the_reward_is_refused():
    with pytest.raises(ConfigError, match=r"use kl.k1, or KLInLoss\(kl.exact\)") as caught:
        KLInReward(kl.exact)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("estimator", [kl.k3, kl.exact])
def test_the_first_step_after_sampling_feels_no_kl_to_the_behavior(estimator):
    algorithm = grpo(kl=KLPenalty(schedules.constant(1.0), KLToBehavior(estimator)))
    batch, _ = ready(random_episodes(), algorithm, old=False)
    assert batch.proximal_logprobs_BT is None
    value, gradient = kl_of_loss(algorithm, batch)
    assert value == 0
    assert not gradient.any()
    # and that is not an approximation: the policies are one, where a divergence has its minimum
    policy = ToyPolicy(seed=1)
    (with_old, _), old = ready(random_episodes(), algorithm), ToyPolicy(seed=1)
    algorithm.loss(policy.evaluate(with_old), with_old, 1.0).loss.backward()
    algorithm.loss(old.evaluate(with_old), with_old, 0.0).loss.backward()
    torch.testing.assert_close(policy.table.grad, old.table.grad, rtol=0, atol=1e-7)


def test_kl_to_the_behavior_needs_no_reference():
    algorithm = ALGORITHMS["entropy_and_kl"]
    prepare_batch(collate(random_episodes()), ToyPolicy(seed=1), algorithm, kl_coefficient=0.3, optimizer_steps=2)


def test_kl_to_the_behavior_is_reported_by_hand():
    _, _, metrics = gradients(groups := random_episodes(), ppo())
    batch = collate(groups)
    moved_BT, old_BT = (policy.evaluate(batch).logprobs_BT for policy in (moved(), ToyPolicy(seed=1)))
    log_ratio = (moved_BT - old_BT).detach()[batch.mask_BT]
    assert metrics["kl/behavior"] == pytest.approx(float((log_ratio.exp() - log_ratio - 1).mean()), rel=1e-5)
    assert metrics["ratio/max"] == pytest.approx(float(log_ratio.exp().max()), rel=1e-5)


def test_the_entropy_bonus_makes_undecided():
    batch, _ = ready(random_episodes(), grpo(kl=NO_KL))
    batch = replace(batch, advantages_BT=torch.zeros_like(batch.rewards_BT))
    policy = ToyPolicy(seed=1)
    with torch.no_grad():
        before = policy.evaluate(batch).entropy_BT
    loss = grpo(kl=NO_KL, entropy_coefficient=0.5).loss(policy.evaluate(batch), batch, 0.0).loss
    assert batch.loss_weights_BT is not None
    assert loss.item() == pytest.approx(-0.5 * float((batch.loss_weights_BT * before).sum()), rel=1e-6)
    loss.backward()
    PlainDescent(policy).step(5.0)
    with torch.no_grad():
        after = policy.evaluate(batch).entropy_BT
    assert float((batch.loss_weights_BT * (after - before)).sum()) > 0.01


@pytest.mark.parametrize(("coefficient", "share"), [(0.0, 2 / 3), (0.1, 1.0)])
def test_the_entropy_bonus_pulls_on_average_rollouts_of_live_groups(coefficient, share):
    groups = [group(episode([0.0, 0.0]), episode([0.5]), episode([1.0]))]
    assert ready(groups, grpo(kl=NO_KL, entropy_coefficient=coefficient))[1]["update/rows"] == pytest.approx(share)
