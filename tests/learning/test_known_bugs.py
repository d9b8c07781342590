"""Bugs that other implementations had, one test each, named after the thread that tells of it.

Their arithmetic is small enough to follow by hand. Padding, permutation and cutting are tested for every algorithm in
test_update_invariance.py; what k1 and k3 do to the gradient as a loss (NeMo-RL 2506, open-instruct 534), in
tests/core/test_kl.py.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from covey.core.advantages import group_mean_only, group_zscore, leave_one_out
from covey.core.aggregation import Counts, count
from covey.core.kl import exact
from covey.core.ratios import sequence_log_ratio
from covey.data import EndReason, Group, Start, collate
from covey.train.update import Learner, StepSizes, UpdatePlan, update
from helpers.gradients import AGGREGATIONS, ALGORITHMS, annotated, gradient_of, make, same, step_gradients
from helpers.toy import Recorder, ToyPolicy, random_groups, rollout

EVERY_ADVANTAGE = pytest.mark.parametrize("advantage", [group_zscore, group_mean_only, leave_one_out])


def group(*rollouts, index: int = 0) -> Group:
    return Group(Start(index, "the same prompt"), list(rollouts))


def loss_with(advantages: list[float], lengths: list[int], averaging: str, rows: int) -> float:
    """The loss of one update on rollouts of given lengths, on policy (so that a decision's loss is -A)."""
    rollouts = [rollout([1] * length, 0.0) for length in lengths]
    batch = collate([group(item, index=i) for i, item in enumerate(rollouts)])
    algorithm = make("grpo", "no_kl", averaging)
    ready = replace(
        batch,
        advantages_BT=torch.where(batch.mask_BT, torch.tensor(advantages)[:, None], 0.0),
        weights_BT=algorithm.aggregation(batch.mask_BT, count(batch.mask_BT)),
    )
    policy = ToyPolicy(seed=1, rows=rows)
    metrics = update(
        Learner(policy, Recorder(policy)), algorithm, ready, UpdatePlan(),
        StepSizes(0.1, kl_coefficient=0.0), seed=0, step=1,
    )  # fmt: skip
    return metrics["loss"]


def test_trl_2995_length_biased_loss():
    # A = 1 over 1 decision, A = -1 over 3. Per sequence: (-1 + 1)/2 = 0. Over tokens: (-1 + 3)/4 = 0.5
    groups = [group(rollout([1], 1.0), rollout([2, 3, 4], 0.0))]
    assert step_gradients(collate(groups), make("grpo"))[1]["loss"] == pytest.approx(0.0, abs=1e-6)
    token_mean = make("grpo", "no_kl", "token")
    assert step_gradients(collate(groups), token_mean)[1]["loss"] == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_trl_3021_token_mean_per_microbatch(rows):
    # losses 2.0 on 1 decision and 0.5 on 9: (2 + 4.5)/10 = 0.65; the mean of the microbatches' means would be 1.25
    assert loss_with([-2.0, -0.5], [1, 9], "token", rows) == pytest.approx(0.65)


@pytest.mark.parametrize("averaging", AGGREGATIONS)
@pytest.mark.parametrize("minibatches", [2, 4])
def test_trl_5619_loss_scaled_by_steps_per_generation(averaging, minibatches):
    # four copies of one group: every minibatch must have the gradient of the whole, not a half, a quarter or four times
    first = random_groups(count=1)[0]
    batch = collate([copy.deepcopy(first) for _ in range(4)])
    algorithm = make("grpo", "no_kl", averaging)
    whole = gradient_of(batch, algorithm)
    for gradient in step_gradients(batch, algorithm, plan=UpdatePlan(minibatches=minibatches))[0]:
        same(gradient, whole)


@pytest.mark.parametrize("averaging", AGGREGATIONS)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_ms_swift_10117_divided_by_accumulation_twice(averaging, rows):
    # four decisions a row, all with loss 3: means are 3 however many microbatches; constant: 4 * 3 / 10
    expected = 1.2 if averaging == "constant" else 3.0
    assert loss_with([-3.0] * 4, [4] * 4, averaging, rows) == pytest.approx(expected)


@pytest.mark.parametrize("averaging", AGGREGATIONS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_verl_5366_sequence_mean_off_by_the_number_of_ranks(averaging, ranks):
    batch, algorithm = collate(random_groups()), make("grpo", "no_kl", averaging)
    loss_BT = torch.rand(batch.mask_BT.shape, generator=torch.Generator().manual_seed(0))
    alone = float((algorithm.aggregation(batch.mask_BT, count(batch.mask_BT)) * loss_BT).sum())
    parts = torch.arange(len(batch)).tensor_split(ranks)
    counts = [count(batch.mask_BT[rows]) for rows in parts]
    together = Counts(sum(c.rollouts for c in counts), sum(c.decisions for c in counts))
    losses = [float((algorithm.aggregation(batch.mask_BT[rows], together) * loss_BT[rows]).sum()) for rows in parts]
    assert sum(losses) == pytest.approx(alone, rel=1e-6)


def test_verl_3741_dr_grpo_normaliser_is_constant_and_averages_over_rollouts():
    # 10 is the constant: (2 * 1 + 6 * 3) / (2 * 10) = 1; with a longer second rollout (2 * 1 + 8 * 3) / 20 = 1.3
    assert loss_with([-1.0, -3.0], [2, 6], "constant", 2) == pytest.approx(1.0)
    assert loss_with([-1.0, -3.0], [2, 8], "constant", 2) == pytest.approx(1.3)
    assert loss_with([-1.0, -3.0] * 3, [2, 6] * 3, "constant", 2) == pytest.approx(1.0)


def test_trl_6369_denominator_counts_truncated_tokens():
    # 2 + 2 decisions are left beside 6 that were cut by the limit: each weighs 1/4, not 1/10
    cut = rollout([1] * 6, 0.0, end=EndReason.LENGTH)
    batch = collate([group(rollout([1, 2], 1.0), rollout([3, 4], 0.5), cut)])
    weights = annotated(batch, make("grpo", "k3_in_loss", "token"), mask_truncated=True)[0].weights_BT
    assert weights is not None
    assert weights.tolist() == [[0.25, 0.25], [0.25, 0.25]]
    # and two rollouts are left of three: 1 / (2 * 2)
    weights = annotated(batch, make("grpo", "k3_in_loss"), mask_truncated=True)[0].weights_BT
    assert weights is not None
    assert weights.tolist() == [[0.25, 0.25], [0.25, 0.25]]


def test_trl_5814_sequence_ratio_as_a_product_decays_with_length():
    # 100 decisions of ratio 0.99: the geometric mean is 0.99, the product 0.366
    new, old = torch.full((1, 100), math.log(0.99)), torch.zeros(1, 100)
    log_ratio = sequence_log_ratio(new, old, torch.ones(1, 100, dtype=torch.bool))
    assert log_ratio.exp()[0].tolist() == pytest.approx([0.99] * 100)


@pytest.mark.parametrize("kl", ["k2_in_loss", "k3_in_loss"])
def test_ragen_58_kl_maximised(kl):
    # one step down the gradient of the KL alone brings the policy nearer to the reference, wherever it was sampled from
    batch, algorithm = collate(random_groups(size=64, count=4)), make("grpo", kl)
    ready = replace(annotated(batch, algorithm)[0], advantages_BT=torch.zeros(batch.mask_BT.shape))
    policy, reference = ToyPolicy(seed=1), ToyPolicy(seed=2)

    def distance() -> float:
        return float(exact(policy.table.detach().log_softmax(-1), reference.table.detach().log_softmax(-1)).sum())

    before = distance()
    algorithm.loss(policy.evaluate(ready), ready, 1.0).loss.backward()
    with torch.no_grad():
        policy.table.sub_(policy.table.grad)
    assert distance() < before


@EVERY_ADVANTAGE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nemo_rl_1518_float_residue_of_equal_rewards_explodes(advantage, dtype):
    # the residue 5.6e-17 (or 3e-8) divided by its own std would be an advantage of order one
    for rewards in ([0.1 + 0.2, 0.3, 0.3, 0.3], [0.7, 0.1 * 7, 0.7, 0.7], [1e3 * 0.1, 100.0, 1e2, 99.99999999999999]):
        reward = torch.tensor(rewards, dtype=dtype)
        made = advantage(reward, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))
        assert made.tolist() == [0.0] * 4


@EVERY_ADVANTAGE
def test_nemo_rl_1518_advantages_stay_of_the_order_of_the_group(advantage):
    # one of sixteen right: no advantage is above sqrt(15) standard deviations, nor above 1 in units of reward
    reward = torch.zeros(16)
    reward[3] = 1.0
    made = advantage(reward, torch.zeros(16, dtype=torch.int64), torch.ones(16, dtype=torch.bool))
    assert float(made.abs().max()) <= math.sqrt(15) + 1e-3


@EVERY_ADVANTAGE
def test_pipelinerl_54_only_the_first_rollout_is_in_the_baseline(advantage):
    group_B, valid_B = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool)
    reward = torch.tensor([1.0, 2.0, 3.0, 7.0])
    before = advantage(reward, group_B, valid_B)
    for row in range(4):
        changed = reward.clone()
        changed[row] += 5.0
        others = torch.arange(4) != row
        assert bool((advantage(changed, group_B, valid_B)[others] != before[others]).all())


@EVERY_ADVANTAGE
def test_gem_113_advantages_normalised_over_the_batch(advantage):
    # a second group of any scale leaves the first one's advantages alone
    reward, valid_B = torch.tensor([1.0, 2.0, 6.0]), torch.ones(6, dtype=torch.bool)
    alone = advantage(reward, torch.zeros(3, dtype=torch.int64), valid_B[:3])
    beside = advantage(torch.cat([reward, 1000 * reward]), torch.tensor([0, 0, 0, 1, 1, 1]), valid_B)
    torch.testing.assert_close(beside[:3], alone)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gem_113_advantages_normalised_twice(name):
    # rewards 0 and 4: mean 2, std 2, mean of the other one 4 or 0
    expected = {"grpo": 1.0, "dr_grpo": 2.0, "reinforce": 2.0, "rloo": 4.0}[name]
    ready, _ = annotated(collate([group(rollout([1], 0.0), rollout([2], 4.0))]), make(name))
    assert ready.advantages_BT is not None
    assert ready.advantages_BT[:, 0].tolist() == pytest.approx([-expected, expected], rel=1e-5)


def test_areal_1419_partial_groups_shift_a_fixed_stride():
    # groups of 3, 1 and 2, all from the same prompt: means 2, none and 20
    groups = [
        group(*(rollout([1], reward) for reward in (1.0, 2.0, 3.0))),
        group(rollout([1], 9.0), index=1),
        group(*(rollout([1], reward) for reward in (10.0, 30.0)), index=2),
    ]
    batch = collate(groups)
    assert make("dr_grpo").advantage(batch).advantages_BT[:, 0].tolist() == [-1.0, 0.0, 1.0, 0.0, -10.0, 10.0]


def test_trl_5902_failed_rewards_counted_as_zero():
    # the mean of 1 and 3 is 2; with the failure as 0 it would be 4/3
    groups = [group(rollout([1], 1.0), rollout([1], None), rollout([1], 3.0)), group(rollout([1], None), index=1)]
    assert make("dr_grpo").advantage(collate(groups)).advantages_BT[:, 0].tolist() == [-1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("hidden", [-1e4, -math.inf, math.nan])
def test_soup_1084_overflow_at_padding_makes_nan_gradients(name, hidden):
    # the old policy's log-probability at padding is nonsense: exp(0 - -1e4) overflows, and 0 * inf is NaN in backward
    ready, _ = annotated(collate(random_groups()), make(name), optimizer_steps=2)
    gradients = []
    for value in (0.0, hidden):
        proximal_BT = ready.proximal_logprobs_BT.masked_fill(~ready.mask_BT, value)
        policy = ToyPolicy(seed=1)
        loss = make(name).loss(policy.evaluate(ready), replace(ready, proximal_logprobs_BT=proximal_BT), 0.0).loss
        loss.backward()
        assert loss.isfinite()
        gradients.append(policy.table.grad)
    assert torch.equal(gradients[0], gradients[1])
