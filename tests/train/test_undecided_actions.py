"""Actions that the policy did not decide change no number of a training step, wherever they stand."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from covey.algorithms import (
    KLInLoss,
    KLInReward,
    KLPenalty,
    KLToBehavior,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    reinforce_pp,
    rloo,
)
from covey.algorithms.advantages import (
    batch_normalized_returns,
    outcome,
    process,
    process_by_step,
    process_return_to_go,
    reward_to_go,
    reward_to_go_by_step,
    within_episode,
)
from covey.core import baselines, kl, schedules
from covey.core.loss_weights import constant_length, count, sequence_mean, token_mean
from covey.core.ratios import ImportanceWeights, sequence_log_ratio, sequence_product_log_ratio, token_log_ratio
from covey.core.returns import discounted_returns, explained_variance, gae
from covey.data import Group, collate
from covey.train.learners import UpdatePlan
from covey.train.metrics import describe
from helpers.credits import episode, gradients, group, random_episodes, ready
from helpers.gradients import same
from helpers.tabular_policy import random_groups
from helpers.undecided import with_gap, with_gaps

NO_KL = KLPenalty()
COEFFICIENT = schedules.constant(0.3)
K3 = KLPenalty(COEFFICIENT, KLInLoss(kl.k3))
K1_IN_REWARD = KLPenalty(COEFFICIENT, KLInReward(kl.k1))
TO_BEHAVIOR = KLPenalty(COEFFICIENT, KLToBehavior(kl.exact))
ALGORITHMS = {
    "grpo": grpo(kl=K3, entropy_coefficient=0.05),
    "grpo_exact_kl": grpo(kl=TO_BEHAVIOR),
    "dr_grpo": dr_grpo(max_length=10, kl=NO_KL),
    "dapo": dapo(kl=NO_KL),
    "gspo": gspo(kl=NO_KL),
    "cispo": cispo(kl=NO_KL),
    "rloo": rloo(kl=K1_IN_REWARD, credit=partial(reward_to_go_by_step, gamma=0.9)),
    "rloo_of_the_group": rloo(kl=NO_KL, credit=partial(reward_to_go, gamma=0.9)),
    "reinforce": reinforce(kl=NO_KL, credit=partial(within_episode, gamma=0.9)),
    "reinforce_pp": reinforce_pp(kl=K1_IN_REWARD),
    "process": grpo(kl=NO_KL, credit=process),
    "process_by_step": grpo(kl=NO_KL, credit=process_by_step),
    "process_return_to_go": grpo(kl=K1_IN_REWARD, credit=process_return_to_go),
    "importance": replace(grpo(kl=NO_KL), importance=ImportanceWeights(cap=2.0, low=0.5)),
    "ppo": ppo(gamma=0.9, lam=0.8, value_clip=0.2, entropy_coefficient=0.05, kl=K1_IN_REWARD),
    "ppo_not_whitened": ppo(gamma=0.9, lam=0.8, whiten=False),
}
EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
PLANS = {
    "one": UpdatePlan(),
    "epochs": UpdatePlan(epochs=2, minibatches=2, critic_epochs=1),
    "warmup": UpdatePlan(critic_warmup_steps=1),
}


def some_groups() -> list[Group]:
    """Rollouts with rewards for every decision, reasoning steps in some, and one whose grading failed."""
    groups = random_episodes(count=4, size=4)
    for made in groups:
        for item in made.rollouts[:2]:
            item.step_ends = sorted({0, len(item.actions) // 2, len(item.actions) - 1})
    groups[1].rollouts[0].reward = None
    return groups


# --- whole steps ---


@pytest.mark.sampled(3)
@EVERY
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_gap_changes_no_gradient_and_no_metric(algorithm, plan):
    groups = some_groups()
    expected = gradients(groups, algorithm, plan=plan)
    found = gradients(with_gaps(groups), algorithm, plan=plan)
    for made, known in zip(found[:2], expected[:2], strict=True):
        assert len(made) == len(known)
        for gradient, reference in zip(made, known, strict=True):
            same(gradient, reference)
    assert found[2] == pytest.approx(expected[2], rel=1e-5, abs=1e-6)


@pytest.mark.sampled(6)
@EVERY
@pytest.mark.parametrize("hidden", [math.inf, math.nan])
def test_what_stands_in_a_gap_is_never_read(algorithm, hidden):
    groups = with_gaps(some_groups())
    (expected,), of_critic, _ = gradients(groups, algorithm)
    (found,), of_the_other, metrics = gradients(groups, algorithm, padding=hidden)
    same(found, expected)
    for gradient, reference in zip(of_the_other, of_critic, strict=True):
        same(gradient, reference)
    assert all(math.isfinite(value) for value in metrics.values()), metrics


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"gspo"}))  # GSPO has one ratio for a whole rollout
def test_minibatches_of_single_decisions_add_up_to_the_step(name):
    groups, algorithm = with_gaps(some_groups()), ALGORITHMS[name]
    plan = UpdatePlan(minibatches=3, single_decisions=True)
    parts, of_critic, _ = gradients(groups, algorithm, plan=plan)
    (whole,), critic_whole, _ = gradients(some_groups(), algorithm)
    same(torch.stack(parts).mean(dim=0), whole)
    for gradient in critic_whole:
        same(torch.stack(of_critic).mean(dim=0), gradient)


@pytest.mark.sampled(12)
@EVERY
@pytest.mark.parametrize("rows", [1, 3])
def test_microbatches_with_gaps(algorithm, rows):
    groups = with_gaps(some_groups())
    (whole,), _, _ = gradients(groups, algorithm)
    same(gradients(groups, algorithm, rows=rows)[0][0], whole)


@pytest.mark.sampled(18)
@EVERY
@settings(max_examples=10)
@given(st.integers(0, 100), st.integers(1, 4))
@example(3, 2)
def test_advantages_returns_and_weights_are_those_of_the_decisions_alone(algorithm, seed, longest):
    groups = random_episodes(seed)
    alone, known = ready(groups, algorithm)
    batch, found = ready(with_gaps(groups, seed, longest), algorithm)
    assert found == pytest.approx(known, rel=1e-5, abs=1e-6)
    for name in ("advantages_BT", "returns_BT", "values_BT", "loss_weights_BT", "proximal_logprobs_BT"):
        value, expected = getattr(batch, name), getattr(alone, name)
        if expected is None:
            assert value is None
            continue
        torch.testing.assert_close(value[batch.mask_BT], expected[alone.mask_BT], rtol=1e-5, atol=1e-6)
        if name != "proximal_logprobs_BT":
            assert not value[~batch.mask_BT].any()


# --- credit by hand ---


def gapped(rewards: list[float], *gaps: int) -> Group:
    return with_gap(episode(rewards), [[4] * length for length in gaps])


def test_the_same_step_is_the_same_decision_not_the_same_column():
    estimate = reward_to_go_by_step(baselines.group_centered, gamma=0.5)
    # returns 2.75 3.5 3 and 1 2: means 1.875, 2.75, and a decision alone
    groups = [group(gapped([1, 2, 3], 0, 3, 1, 2), gapped([0, 2], 1, 0, 1))]
    found = estimate(collate(groups)).advantages_BT
    assert found.tolist() == [[0.875, 0, 0, 0, 0.75, 0, 0, 0, 0], [0, -0.875, -0.75, 0, 0, 0, 0, 0, 0]]


def test_gae_over_a_gap_by_hand():
    # gamma 1/2, lambda 1/2; values 2 4 8: delta 1, 2, -2 with 6 after the last decision
    mask_BT = torch.tensor([[False, True, False, False, True, True, False]])
    values_BT = torch.tensor([[99.0, 2, 99, 99, 4, 8, 99]])
    rewards_BT = torch.tensor([[0.0, 1, 0, 0, 2, 3, 0]])
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, torch.tensor([6.0]), mask_BT, gamma=0.5, lam=0.5)
    assert advantages_BT.tolist() == [[0, 1.375, 0, 0, 1.5, -2, 0]]
    assert returns_BT.tolist() == [[0, 3.375, 0, 0, 5.5, 6, 0]]


def test_lengths_count_decisions():
    groups = [group(gapped([1, 2, 3], 0, 5, 0, 0), gapped([1], 0, 9), episode([1, 1]))]
    metrics = describe(groups)
    assert metrics["length/mean"] == 2
    assert metrics["length/max"] == 3
    assert metrics["decisions/sampled"] == 6
    assert describe(with_gaps(random_groups())) == describe(random_groups())


# --- functions of the core, over random masks ---


def compact(value_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The decisions of every row without the columns between them, padded on the right with NaN; and their mask."""
    lengths_B = mask_BT.sum(dim=1)
    inside_BT = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
    compact_BT = torch.full(inside_BT.shape, math.nan, dtype=value_BT.dtype)
    compact_BT[inside_BT] = value_BT[mask_BT]
    return compact_BT, inside_BT


MASKS = st.integers(1, 8).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width).filter(any), min_size=1, max_size=5)
)
AN_EXAMPLE = [[True, False, True, True], [False, True, False, True], [True, True, True, True], [True, False] * 2]
WEIGHTS = ImportanceWeights(cap=1.5, low=0.5, high=4.0)
FUNCTIONS = {
    "returns": lambda x, y, mask: [discounted_returns(x, mask, 0.9)],
    "gae": lambda x, y, mask: gae(x, y, torch.arange(1, len(mask) + 1).double(), mask, gamma=0.9, lam=0.7),
    "token_ratio": lambda x, y, mask: [token_log_ratio(x, y, mask)],
    "sequence_ratio": lambda x, y, mask: [sequence_log_ratio(x, y, mask)],
    "product_ratio": lambda x, y, mask: [sequence_product_log_ratio(x, y, mask)],
    "importance": lambda x, y, mask: [torch.where(mask, WEIGHTS(x, y, mask).weight_BT, 0.0)],
    "capped": lambda x, y, mask: [WEIGHTS(x, y, mask).capped_BT.double()],
    "masked": lambda x, y, mask: [WEIGHTS(x, y, mask).masked_BT.double()],
    "sequence_mean": lambda x, y, mask: [sequence_mean(mask, count(mask)).double()],
    "token_mean": lambda x, y, mask: [token_mean(mask, count(mask)).double()],
    "constant_length": lambda x, y, mask: [constant_length(4)(mask, count(mask)).double()],
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@given(MASKS, st.integers(0, 1000))
@example(AN_EXAMPLE, 0)
def test_a_function_of_the_core_sees_the_decisions_alone(function, marks, seed):
    mask_BT = torch.tensor(marks)
    source = torch.Generator().manual_seed(seed)
    x_BT, y_BT = torch.randn(2, *mask_BT.shape, generator=source, dtype=torch.float64)
    spoiled = [torch.where(mask_BT, value_BT, math.nan) for value_BT in (x_BT, y_BT)]
    found = function(*spoiled, mask_BT)
    expected = function(compact(x_BT, mask_BT)[0], *compact(y_BT, mask_BT))
    inside_BT = compact(x_BT, mask_BT)[1]
    for value_BT, known_BT in zip(found, expected, strict=True):
        torch.testing.assert_close(value_BT[mask_BT], known_BT[inside_BT], rtol=1e-12, atol=1e-12)
        assert not value_BT[~mask_BT].any()


@given(MASKS, st.integers(0, 1000))
@example(AN_EXAMPLE, 0)
def test_explained_variance_sees_the_decisions_alone(marks, seed):
    mask_BT = torch.tensor(marks)
    values_BT, returns_BT = torch.randn(2, *mask_BT.shape, generator=torch.Generator().manual_seed(seed))
    found = explained_variance(torch.where(mask_BT, values_BT, math.nan), returns_BT, mask_BT)
    flat = [value_BT[mask_BT][None] for value_BT in (values_BT, returns_BT)]
    assert float(found) == pytest.approx(float(explained_variance(*flat, torch.ones_like(flat[0]).bool())), abs=1e-6)


ESTIMATORS = {
    "outcome": outcome,
    "reward_to_go": reward_to_go,
    "reward_to_go_by_step": reward_to_go_by_step,
    "within_episode": within_episode,
    "over_the_batch": batch_normalized_returns,
    "process": process,
    "process_by_step": process_by_step,
    "process_return_to_go": process_return_to_go,
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("credit", ESTIMATORS.values(), ids=ESTIMATORS)
@settings(max_examples=30)
@given(MASKS, st.integers(0, 1000))
@example(AN_EXAMPLE, 0)
def test_credit_over_random_masks(credit, marks, seed):
    """The decisions of a batch with random holes, and the same without the holes."""
    source = torch.Generator().manual_seed(seed)
    items = []
    for row in marks:
        item = episode(torch.randn(sum(row), generator=source).tolist())
        item.step_ends = sorted({0, sum(row) - 1})
        before = "".join("d" if mark else "g" for mark in row).split("d")
        items.append((item, with_gap(item, [[1] * len(gap) for gap in before])))
    alone, holes = (collate([group(*found)]) for found in zip(*items, strict=True))
    assert holes.mask_BT.tolist() == marks
    estimate = credit(baselines.group_zscore)
    found, expected = estimate(holes).advantages_BT, estimate(alone).advantages_BT
    torch.testing.assert_close(found[holes.mask_BT], expected[alone.mask_BT], rtol=1e-5, atol=1e-6)
    assert not found[~holes.mask_BT].any()
