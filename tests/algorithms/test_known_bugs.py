"""Bugs that other implementations had, one test each, named after the thread that tells of it.

Here are those whose arithmetic is small enough to follow by hand; those of language models are in
tests/llm/test_known_bugs.py. All of them, each with the tests that notice it or with why there is none:

 1  the loss averaged over tokens where rollouts were meant: test_trl_2995_length_biased_loss
 2  the mean over tokens taken in each microbatch: test_trl_3021_token_mean_per_microbatch
 3  the loss scaled by the number of optimizer steps: test_trl_5619_loss_scaled_by_steps_per_generation,
    test_trl_5619_relatives_scaled_by_steps_per_generation
 4  the loss divided by the microbatches twice: test_ms_swift_10117_divided_by_accumulation_twice
 5  a mean wrong by the number of ranks: test_verl_5366_sequence_mean_off_by_the_number_of_ranks
 6  Dr.GRPO's length not constant: test_verl_3741_dr_grpo_normaliser_is_constant_and_averages_over_rollouts
 7  tokens counted that the loss left out: test_trl_6369_denominator_counts_truncated_tokens
 8  padding in the ratio of a whole rollout: test_trl_6654_padding_leaks_into_the_ratio_of_a_rollout
 9  log-probabilities without the temperature: test_trl_3029_logprobs_not_divided_by_the_temperature
10  log-probabilities, not logits, divided by it: test_prime_rl_697_temperature_applied_to_logprobs
11  the tail cut while sampling: test_trl_6789_sampling_from_a_part_of_the_vocabulary_is_refused
12  a ratio that decays with length: test_trl_5814_sequence_ratio_as_a_product_decays_with_length
13  a fast path that forgets a part of the loss: test_liger_1082_fast_path_ignores_the_ratio_and_the_mask
14  gradients of the KL estimators: test_nemo_rl_2506_k1_in_the_loss_does_not_pull,
    test_nemo_rl_2506_k3_in_the_loss_pulls_as_the_reverse_kl_does
15  the KL maximised: test_ragen_58_kl_maximised
16  the KL counted twice, or NaN where it is off: test_openrlhf_768_kl_counted_twice,
    test_openrlhf_768_kl_of_nan_where_it_is_off
17  rounding taken for a difference of rewards: test_nemo_rl_1518_float_residue_of_equal_rewards_explodes,
    test_nemo_rl_1518_advantages_stay_of_the_order_of_the_group
18  a baseline from the first rollout only: test_pipelinerl_54_only_the_first_rollout_is_in_the_baseline
19  advantages normalised over the batch, or twice: test_gem_113_advantages_normalised_over_the_batch,
    test_gem_113_advantages_normalised_twice
20  groups told apart by position or by prompt: test_areal_1419_partial_groups_shift_a_fixed_stride
21  a failed reward counted as 0: test_trl_5902_failed_rewards_counted_as_zero
22  a wrong number of rewards: test_trl_1_16_wrong_number_of_rewards
23  end and pad tokens known by their ids: test_trl_4970_every_declared_end_id_ends_and_pad_is_not_known_by_its_id
24  positions shifted by padding on the left: test_openrlhf_217_left_padding_shifts_positions
25  text decoded and encoded again: test_trl_5224_completions_decoded_and_encoded_again,
    test_nemo_rl_2176_assistant_turns_of_the_prompt_trained_on
26  a sampler with old weights: test_trl_5312_sampler_keeps_old_weights
27  later minibatches taken for on policy: test_trl_3493_later_passes_used_as_if_on_policy
28  resuming that forgets or repeats prompts, optimizer steps or the learning rate's place:
    test_resumed_run_ends_like_one_that_never_stopped,
    test_killed_runs_end_with_the_same_bits
29  returns that stop at undecided columns: test_verl_1527_observations_block_the_return
30  metrics averaged over unequal parts: test_trl_6380_metrics_depend_on_the_microbatches
31  rounding of bf16 in pieces of the vocabulary biases the entropy: test_trl_7268_bf16_biases_the_entropy

What of these cannot happen here: ranks (5, 30; there is one, so its counts are split by hand), a sampler in another
process or with adapters (26), rollouts that arrive while training goes on (28), adapters (DoRA, 31).
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.algorithms import cispo, dapo, gspo, reinforce_pp
from covey.algorithms.advantages import batch_normalized_returns
from covey.core import schedules
from covey.core.baselines import group_centered, group_zscore, leave_one_out
from covey.core.kl import exact
from covey.core.loss_weights import Counts, count
from covey.core.ratios import sequence_log_ratio
from covey.data import EndReason, Group, Start, collate
from covey.train.learners import UpdatePlan
from helpers.gradients import AGGREGATIONS, ALGORITHMS, NO_KL, annotated, gradient_of, make, same, step_gradients
from helpers.tabular_policy import PlainDescent, Recorder, ToyPolicy, random_groups, rollout
from helpers.updates import one_update

RELATIVES = {"dapo": dapo(), "gspo": gspo(), "cispo": cispo(), "reinforce_pp": reinforce_pp(kl=NO_KL)}
EVERY_ADVANTAGE = pytest.mark.parametrize("advantage", [group_zscore, group_centered, leave_one_out])


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
        loss_weights_BT=algorithm.aggregation(batch.mask_BT, count(batch.mask_BT)),
    )
    policy = ToyPolicy(seed=1, rows=rows)
    metrics = one_update(
        policy, Recorder(policy), algorithm, ready, learning_rate=0.1, kl_coefficient=0.0, seed=0, step=1
    )
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


@pytest.mark.parametrize("name", RELATIVES)
@pytest.mark.parametrize("minibatches", [2, 4])
def test_trl_5619_relatives_scaled_by_steps_per_generation(name, minibatches):
    first = random_groups(count=1)[0]
    batch = collate([copy.deepcopy(first) for _ in range(4)])
    whole = gradient_of(batch, RELATIVES[name])
    for rows in (2, 1000):
        plan = UpdatePlan(minibatches=minibatches)
        for gradient in step_gradients(batch, RELATIVES[name], plan=plan, rows=rows)[0]:
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
    weights = annotated(batch, make("grpo", "k3_in_loss", "token"), mask_truncated=True)[0].loss_weights_BT
    assert weights is not None
    assert weights.tolist() == [[0.25, 0.25], [0.25, 0.25]]
    # and two rollouts are left of three: 1 / (2 * 2)
    weights = annotated(batch, make("grpo", "k3_in_loss"), mask_truncated=True)[0].loss_weights_BT
    assert weights is not None
    assert weights.tolist() == [[0.25, 0.25], [0.25, 0.25]]


@pytest.mark.parametrize("padding", [0.0, -30.0])
def test_trl_6654_padding_leaks_into_the_ratio_of_a_rollout(padding):
    # Long rollouts beside short ones make padding for these. Each rollout counts the same, so the gradient of both
    # groups is the mean of theirs. With two epochs the old policy is evaluated too.
    short = group(*(rollout([1, 2][:length], float(length)) for length in (1, 2)))
    long = group(*(rollout([3] * length, float(length)) for length in (11, 12)), index=1)
    plan = UpdatePlan(epochs=2)
    alone = [step_gradients(collate([one]), gspo(), plan=plan)[0] for one in (short, long)]
    together, _ = step_gradients(collate([short, long]), gspo(), plan=plan, padding=padding)
    for left, *parts in zip(together, *alone, strict=True):
        same(left, sum(parts) / 2)


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


def test_openrlhf_768_kl_counted_twice():
    # taken off the reward, the KL is not in the loss as well
    algorithm = make("grpo", "k1_in_reward")
    ready, _ = annotated(collate(random_groups()), algorithm)
    losses = [algorithm.loss(ToyPolicy(seed=1).evaluate(ready), ready, beta).loss.item() for beta in (0.0, 0.3)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kl", ["k1_in_loss", "k2_in_loss", "k3_in_loss"])
def test_openrlhf_768_kl_of_nan_where_it_is_off(kl):
    # without a coefficient nobody asks the reference, and what stands there is NaN: 0 * NaN would be NaN
    batch = collate(random_groups())
    off = replace(make("grpo", kl), kl=replace(make("grpo", kl).kl, coefficient=schedules.constant(0.0)))
    ready, _ = annotated(batch, off)
    assert ready.reference_logprobs_BT is not None
    assert ready.reference_logprobs_BT.isnan().any()
    ((gradient,), metrics), ((expected,), without) = (step_gradients(batch, a) for a in (off, make("grpo", "no_kl")))
    same(gradient, expected)
    assert metrics["loss"] == without["loss"], "a NaN may be in the loss and not in the gradient"


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


@pytest.mark.parametrize("plan", [UpdatePlan(epochs=2), UpdatePlan(minibatches=2)], ids=["epochs", "minibatches"])
def test_trl_3493_later_passes_used_as_if_on_policy(plan):
    # One large step takes every ratio beyond its bound, so the second step, on the same rollouts or on their copies,
    # must find nothing left to gain. Measured from the policy of that moment it would find a whole gradient.
    groups = [group(rollout([1], 1.0), rollout([2], 0.0), index=i) for i in range(2)]
    algorithm = make("grpo")
    ready, _ = annotated(collate(groups), algorithm, optimizer_steps=plan.optimizer_steps(1))
    policy = ToyPolicy(seed=1)
    tables = []

    class Watched(PlainDescent):
        def before_last_pass(self) -> None: ...

        def step(self, learning_rate):
            result = super().step(learning_rate)
            tables.append(policy.table.detach().clone())
            return result

    one_update(policy, Watched(policy), algorithm, ready, plan, learning_rate=20.0, seed=0, step=1)
    assert len(tables) == 2
    assert not torch.equal(tables[0], ToyPolicy(seed=1).table)
    assert torch.equal(tables[0], tables[1])


def test_verl_1527_observations_block_the_return():
    # a tool's answer stands between two decisions: what is earned after it belongs to the decision before it too
    batch = collate([group(rollout([1, 2, 3], 4.0), rollout([1, 2, 3], 0.0))])
    batch.mask_BT[:, 1] = False
    seen: list[list[float]] = []

    def compare(value_N, group_N, valid_N):
        seen.append(value_N.tolist())
        return value_N

    assert batch_normalized_returns(compare)(batch).advantages_BT.tolist() == [[4.0, 0.0, 4.0], [0.0, 0.0, 0.0]]
    assert seen == [[4.0, 4.0, 0.0, 0.0]], "what the policy did not decide is in no mean"


@pytest.mark.parametrize("rows", [1, 3])
def test_trl_6380_metrics_depend_on_the_microbatches(rows):
    batch, plan = collate(random_groups()), UpdatePlan(epochs=2, minibatches=2)
    whole, cut = (step_gradients(batch, make("grpo", "k3_in_loss"), plan=plan, rows=n)[1] for n in (1000, rows))
    assert cut == pytest.approx(whole, rel=1e-6, abs=1e-9)


def test_every_bug_of_the_list_has_a_test_that_exists():
    assert __doc__ is not None
    rows = re.findall(r"^ *(\d+)  (.*?)(?=^ *\d+  |^$)", __doc__, flags=re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in rows] == list(range(1, 32))
    tests = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    for number, text in rows:
        named = re.findall(r"test_\w+", text)
        assert named, number
        assert [name for name in named if f"def {name}(" not in tests] == []
