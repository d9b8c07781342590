"""How a training step is cut and laid out does not change its gradient, and that gradient is the papers'."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.config import ConfigError
from covey.core.loss_weights import count
from covey.data import Batch, Group, Start, collate
from covey.train.learners import UpdatePlan
from covey.train.prepare import prepare_batch
from helpers.gradients import (
    AGGREGATIONS,
    ALGORITHMS,
    KLS,
    annotated,
    formula_gradient,
    gradient_of,
    make,
    same,
    step_gradients,
)
from helpers.tabular_policy import Recorder, ToyPolicy, random_groups, rollout
from helpers.updates import one_update

EVERY = pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(make(name, kl, averaging), id=f"{name}-{kl}-{averaging}")
        for name in ALGORITHMS
        for kl in ("no_kl", "k3_in_loss", "k1_in_reward")
        for averaging in AGGREGATIONS
    ],
)
WITHOUT_KL = pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(make(name, "no_kl", averaging), id=f"{name}-{averaging}")
        for name in ALGORITHMS
        for averaging in AGGREGATIONS
    ],
)


def with_dead_group() -> list[Group]:
    groups = random_groups()
    for item in groups[1].rollouts:
        item.reward = 0.5
    return groups


@pytest.mark.sampled(24)
@pytest.mark.parametrize("averaging", AGGREGATIONS)
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_is_the_papers(name, kl, averaging):
    groups = random_groups()
    same(gradient_of(groups, make(name, kl, averaging)), formula_gradient(groups, name, kl, averaging))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_of_the_defaults_is_the_papers(name):
    groups = random_groups(seed=3)
    same(gradient_of(groups, make(name, "k3_in_loss")), formula_gradient(groups, name, "k3_in_loss"))


@pytest.mark.sampled(5)
@EVERY
@pytest.mark.parametrize("hidden", [math.inf, -math.inf, math.nan])
def test_what_stands_at_padding_is_never_read(algorithm, hidden):
    batch = collate(random_groups())
    expected = gradient_of(batch, algorithm)
    spoiled = padded(batch, 2, hidden)
    spoiled.behavior_logprobs_BT[~spoiled.mask_BT] = hidden
    same(gradient_of(spoiled, algorithm, padding=hidden), expected)
    gradients, metrics = step_gradients(spoiled, algorithm, padding=hidden, plan=UpdatePlan(epochs=2))
    same(gradients[1], expected)
    assert all(math.isfinite(value) for value in metrics.values()), metrics


@EVERY
def test_permutation_of_rows(algorithm):
    batch = collate(random_groups())
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    same(gradient_of(batch.select(order), algorithm), gradient_of(batch, algorithm))


@pytest.mark.sampled(5)
@EVERY
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_microbatch_size(algorithm, rows):
    batch = collate(random_groups())
    same(gradient_of(batch, algorithm, rows=rows), gradient_of(batch, algorithm))


@pytest.mark.sampled(30)
@EVERY
@pytest.mark.parametrize("minibatches", [2, 3, 4])
def test_mean_of_the_minibatches_is_the_step(algorithm, minibatches):
    batch = collate(random_groups())
    gradients, metrics = step_gradients(batch, algorithm, plan=UpdatePlan(minibatches=minibatches), rows=3)
    assert len(gradients) == minibatches == metrics["update/optimizer_steps"]
    same(torch.stack(gradients).sum(dim=0) / minibatches, gradient_of(batch, algorithm))


@pytest.mark.sampled(6)
@EVERY
def test_every_epoch_at_frozen_weights_sees_the_same_gradient(algorithm):
    batch = collate(random_groups())
    gradients, _ = step_gradients(batch, algorithm, plan=UpdatePlan(epochs=3))
    assert len(gradients) == 3
    for gradient in gradients:
        same(gradient, gradient_of(batch, algorithm))


def test_more_minibatches_than_live_groups():
    groups = with_dead_group()[:2]
    algorithm = make("grpo")
    gradients, _ = step_gradients(collate(groups), algorithm, plan=UpdatePlan(minibatches=2))
    assert len(gradients) == 1
    same(gradients[0] / 2, gradient_of(groups, algorithm))


def test_a_group_stays_in_one_minibatch_and_the_order_depends_on_the_step():
    policy, seen = ToyPolicy(seed=1), []
    batch, _ = annotated(collate(random_groups(count=6)), make("grpo"))

    class Watching(ToyPolicy):
        def evaluate(self, part):
            seen.append(part.group_B.tolist())
            return super().evaluate(part)

    for step in (1, 2, 3, 1):
        policy = Watching(seed=1)
        one_update(
            policy,
            Recorder(policy),
            make("grpo"),
            batch,
            UpdatePlan(minibatches=3),
            learning_rate=0.1,
            kl_coefficient=0.0,
            seed=0,
            step=step,
        )
    per_step = [[set(part) for part in seen[i : i + 3]] for i in range(0, 12, 3)]
    assert all(len(part) == 2 for step in per_step for part in step)
    assert all(set.union(*step) == set(range(6)) for step in per_step)
    assert per_step[0] == per_step[3]
    assert per_step[0] != per_step[1] or per_step[1] != per_step[2]


@WITHOUT_KL
def test_dead_groups_dropped_or_kept_give_the_same_gradient(algorithm):
    groups = with_dead_group()
    batch = collate(groups)
    ready, metrics = annotated(batch, algorithm)
    assert 1 not in ready.group_B.tolist()
    assert metrics["groups/zero_advantage_fraction"] == 0.25
    same(gradient_of(groups, algorithm), gradient_of_all_rows(batch, algorithm))


@pytest.mark.parametrize("kl", ["no_kl", "k3_in_loss"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_dead_groups_count_in_the_denominators_and_have_no_kl(name, kl):
    groups = with_dead_group()
    same(gradient_of(groups, make(name, kl)), formula_gradient(groups, name, kl))


def test_kl_pulls_on_the_rollout_of_a_live_group_whose_reward_is_the_mean():
    groups = [Group(Start(0, "a"), [rollout([1, 2], 0.0), rollout([3, 0], 0.5), rollout([4], 1.0)])]
    same(gradient_of(groups, make("grpo", "k3_in_loss")), formula_gradient(groups, "grpo", "k3_in_loss"))


@pytest.mark.sampled(6)
@EVERY
def test_failed_rollouts_change_neither_baseline_nor_denominators(algorithm):
    groups = random_groups()
    expected = gradient_of(groups, algorithm)
    with_failures = copy.deepcopy(groups)
    failed = rollout([1, 2, 3, 4, 0, 1, 2], None, logprob=-3.0)
    for place, group in enumerate(with_failures):
        group.rollouts.insert(place, failed)
    with_failures.insert(1, Group(Start(9, "all failed"), [failed, failed]))
    same(gradient_of(with_failures, algorithm), expected)


@EVERY
def test_truncated_rollouts_masked_are_in_neither_numerator_nor_denominator(algorithm):
    groups = random_groups()
    advantages = annotated(collate(groups), algorithm)[0].advantages_BT
    ready, metrics = annotated(collate(groups), algorithm, mask_truncated=True)
    assert not ready.truncated_B.any()
    assert ready.loss_weights_BT is not None
    assert ready.advantages_BT is not None
    # the baseline still knows the truncated rollouts' rewards
    assert advantages is not None
    torch.testing.assert_close(
        ready.advantages_BT[:, 0], advantages[[row for row in range(16) if row % 4 != 3], 0], rtol=0, atol=0
    )
    decisions = sum(len(item.actions) for group in groups for item in group.rollouts[:3])
    assert metrics["decisions/trained"] == decisions


@pytest.mark.sampled(12)
@pytest.mark.parametrize("averaging", AGGREGATIONS)
@pytest.mark.parametrize("kl", ["no_kl", "k3_in_loss", "k1_in_reward"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_with_truncated_rollouts_masked_is_the_papers(name, kl, averaging):
    groups = random_groups()
    made = gradient_of(groups, make(name, kl, averaging), mask_truncated=True)
    same(made, formula_gradient(groups, name, kl, averaging, mask_truncated=True))


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("kl", KLS)
def test_a_step_that_teaches_nothing_makes_no_optimizer_step(kl, minibatches):
    groups = random_groups(count=2)
    for group in groups:
        for item in group.rollouts:
            item.reward = None if group is groups[0] or kl == "k1_in_reward" else 1.0
    gradients, metrics = step_gradients(collate(groups), make("grpo", kl), plan=UpdatePlan(minibatches=minibatches))
    assert gradients == []
    assert metrics["groups/zero_advantage_fraction"] == 1.0
    assert metrics["update/rows"] == metrics["decisions/trained"] == metrics["loss"] == 0.0


@pytest.mark.parametrize("kl", ["k3_in_loss", "k1_in_reward"])
def test_a_kl_without_a_reference_is_refused(kl):
    with pytest.raises(ConfigError, match="no reference policy"):
        prepare_batch(collate(random_groups()), ToyPolicy(), make("grpo", kl), kl_coefficient=0.1)


def test_a_coefficient_of_zero_only_watches_the_kl():
    groups, algorithm = random_groups(), make("grpo")
    ready, metrics = annotated(collate(groups), algorithm)
    # every eighth group is read: only group 0 of four
    assert bool(ready.reference_logprobs_BT[ready.group_B == 0][:, 0].isfinite().all())
    assert bool(ready.reference_logprobs_BT[ready.group_B != 0].isnan().all())
    values = []
    for item in groups[0].rollouts:
        reference = ToyPolicy(seed=2).evaluate(collate([Group(Start(0, 0), [item])])).logprobs_BT[0].tolist()
        for old, ref in zip(item.behavior_logprobs, reference, strict=True):
            values.append(math.exp(ref - old) - (ref - old) - 1)
    assert metrics["kl"] == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_the_old_policy_is_evaluated_only_where_it_can_differ():
    assert annotated(collate(random_groups()), make("grpo"))[0].proximal_logprobs_BT is None
    ready, _ = annotated(collate(random_groups()), make("grpo"), optimizer_steps=2)
    policy = ToyPolicy(seed=1).evaluate(ready).logprobs_BT
    torch.testing.assert_close(ready.proximal_logprobs_BT[ready.mask_BT].double(), policy[ready.mask_BT].detach())


def test_metrics_of_an_update_by_hand():
    # old policy's probabilities are 1.5, 0.5, 1 and 1.1 times smaller than the current one's, A is 2, -2, 2, 2:
    # losses -2.4, 1.6, -2, -2.2 (clip 0.2), token weights 1/4: loss -5/4
    policy = ToyPolicy(seed=1)
    batch = collate([Group(Start(0, "a"), [rollout([1, 2], 1.0), rollout([3, 4], 0.0)])])
    logprobs = policy.evaluate(batch).logprobs_BT.detach()
    ratio = torch.tensor([[1.5, 0.5], [1.0, 1.1]], dtype=torch.float64)
    ready = replace(
        batch,
        advantages_BT=torch.tensor([[2.0, -2.0], [2.0, 2.0]]),
        proximal_logprobs_BT=logprobs - ratio.log(),
        loss_weights_BT=torch.full((2, 2), 0.25),
        behavior_logprobs_BT=logprobs - torch.tensor([[0.1, -0.2], [0.3, 0.0]]),
    )
    metrics = one_update(
        policy, Recorder(policy), make("grpo"), ready, learning_rate=0.1, kl_coefficient=0.0, seed=0, step=1
    )
    assert metrics["loss"] == pytest.approx(-5 / 4)
    assert metrics["clip/low"] == metrics["clip/high"] == 0.25
    assert metrics["ratio/max"] == pytest.approx(1.5)
    assert metrics["mismatch/mean"] == pytest.approx((0.1 + 0.2 + 0.3) / 4)
    entropy = policy.evaluate(batch).entropy_BT.mean()
    assert metrics["entropy"] == pytest.approx(entropy.item())


def padded(batch: Batch, columns: int, logprob: float) -> Batch:
    def pad(tensor: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, columns), value=value)

    return replace(
        batch,
        actions_BT=pad(batch.actions_BT, 3),
        mask_BT=pad(batch.mask_BT, False),
        behavior_logprobs_BT=pad(batch.behavior_logprobs_BT, logprob),
        rewards_BT=pad(batch.rewards_BT, logprob),
    )


def gradient_of_all_rows(batch: Batch, algorithm: Algorithm) -> Tensor:
    """The step's gradient with no row left out."""
    policy = ToyPolicy(seed=1)
    everything = replace(
        batch,
        advantages_BT=algorithm.advantage(batch).advantages_BT,
        loss_weights_BT=algorithm.aggregation(batch.mask_BT, count(batch.mask_BT)),
    )
    algorithm.loss(policy.evaluate(everything), everything, 0.0).loss.backward()
    assert policy.table.grad is not None
    return policy.table.grad
