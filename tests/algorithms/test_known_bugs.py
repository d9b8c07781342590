"""Bugs that other implementations had, each with the tests that notice it.

A test that only one bug needs is named after the thread that tells of it, and is here or, for language models, in
tests/llm/test_known_bugs.py.

 1  the loss averaged over tokens where rollouts were meant: test_gradient_is_the_papers
 2  the mean over tokens taken in each microbatch: test_microbatch_size
 3  the loss scaled by the number of optimizer steps: test_mean_of_the_minibatches_is_the_step,
    test_trl_5619_relatives_scaled_by_steps_per_generation
 4  the loss divided by the microbatches twice: test_microbatch_size
 5  a mean wrong by the number of ranks: test_weights_of_a_part_are_a_part_of_the_weights
 6  Dr.GRPO's length not constant: test_constant_length_does_not_depend_on_how_long_rollouts_are
 7  tokens counted that the loss left out: test_truncated_rollouts_masked_are_in_neither_numerator_nor_denominator
 8  padding in the ratio of a whole rollout: test_trl_6654_padding_leaks_into_the_ratio_of_a_rollout
 9  log-probabilities without the temperature: test_behavior_logprobs_are_those_of_a_full_forward
10  log-probabilities, not logits, divided by it: test_prime_rl_697_temperature_applied_to_logprobs
11  the tail cut while sampling: test_trl_6789_sampling_from_a_part_of_the_vocabulary_is_refused
12  a ratio that decays with length: test_sequence_does_not_shrink_with_length
13  a fast path that forgets a part of the loss: test_packed_and_plain_evaluation_agree_with_their_gradients
14  gradients of the KL estimators: test_nemo_rl_2506_k1_in_the_loss_does_not_pull,
    test_nemo_rl_2506_k3_in_the_loss_pulls_as_the_reverse_kl_does
15  the KL maximised: test_ragen_58_kl_maximised
16  the KL counted twice, or NaN where it is off: test_openrlhf_768_kl_counted_twice,
    test_openrlhf_768_kl_of_nan_where_it_is_off
17  rounding taken for a difference of rewards: test_equal_rewards_give_exactly_zero,
    test_sum_of_ten_tenths_equals_one
18  a baseline from the first rollout only: test_zscore_by_hand, test_leave_one_out_by_hand
19  advantages normalised over the batch, or twice: test_groups_are_compared_with_themselves_only,
    test_gradient_is_the_papers
20  groups told apart by position or by prompt: test_areal_1419_partial_groups_shift_a_fixed_stride
21  a failed reward counted as 0: test_failed_rows_leave_their_group
22  a wrong number of rewards: test_anything_else_is_one_line
23  end and pad tokens known by their ids: test_trl_4970_every_declared_end_id_ends_and_pad_is_not_known_by_its_id
24  positions shifted by padding on the left: test_behavior_logprobs_are_those_of_a_full_forward
25  text decoded and encoded again: test_trl_5224_completions_decoded_and_encoded_again,
    test_nemo_rl_2176_assistant_turns_of_the_prompt_trained_on
26  a sampler with old weights: test_trl_5312_sampler_keeps_old_weights
27  later minibatches taken for on policy: test_trl_3493_later_passes_used_as_if_on_policy
28  resuming that forgets or repeats prompts, optimizer steps or the learning rate's place:
    test_resumed_run_ends_like_one_that_never_stopped,
    test_killed_runs_end_with_the_same_bits
29  returns that stop at undecided columns: test_gae_over_a_gap_by_hand
30  metrics averaged over unequal parts: test_trl_6380_metrics_depend_on_the_microbatches
31  rounding of bf16 in pieces of the vocabulary biases the entropy: test_trl_7268_bf16_biases_the_entropy

What of these cannot happen here: ranks (5, 30; there is one, so its counts are split by hand), a sampler in another
process or with adapters (26), rollouts that arrive while training goes on (28), adapters (DoRA, 31).
"""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.algorithms import cispo, dapo, gspo, reinforce_pp
from covey.core import schedules
from covey.core.kl import exact
from covey.data import Group, Start, collate
from covey.train.learners import UpdatePlan
from helpers.gradients import NO_KL, annotated, gradient_of, make, same, step_gradients
from helpers.tabular_policy import PlainDescent, ToyPolicy, random_groups, rollout
from helpers.updates import one_update

RELATIVES = {"dapo": dapo(), "gspo": gspo(), "cispo": cispo(), "reinforce_pp": reinforce_pp(kl=NO_KL)}


def group(*rollouts, index: int = 0) -> Group:
    return Group(Start(index, "the same prompt"), list(rollouts))


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


def test_areal_1419_partial_groups_shift_a_fixed_stride():
    # groups of 3, 1 and 2, all from the same prompt: means 2, none and 20
    groups = [
        group(*(rollout([1], reward) for reward in (1.0, 2.0, 3.0))),
        group(rollout([1], 9.0), index=1),
        group(*(rollout([1], reward) for reward in (10.0, 30.0)), index=2),
    ]
    batch = collate(groups)
    assert make("dr_grpo").advantage(batch).advantages_BT[:, 0].tolist() == [-1.0, 0.0, 1.0, 0.0, -10.0, 10.0]


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
