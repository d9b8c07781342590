"""Which gradients are right on average, by listing all samples of a small policy (helpers/enumeration.py).

G is the size of a group. On policy, and without a KL unless it says so.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from covey.algorithms import ALGORITHMS, dr_grpo, grpo, ppo, reinforce, rloo
from covey.algorithms.advantages import outcome
from covey.core.baselines import group_centered
from helpers import enumeration
from helpers.enumeration import (
    COMPLETIONS,
    NO_KL,
    PROMPTS,
    ListedPolicy,
    expected_gradient,
    graded,
    summed,
    true_gradient,
)

PAGE = Path(__file__).parents[2] / "docs" / "mathematics.md"
LINES = PAGE.read_text().partition("## Which estimators are unbiased?")[2].splitlines()
EVERY_SIZE = pytest.mark.parametrize("size", [2, 3])


def equal(left: Tensor, right: Tensor) -> None:
    """To the precision of float64."""
    assert float(right.norm()) > 1e-3, "a gradient of zero would prove nothing"
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-14)


def test_every_completion_is_listed_once():
    assert len(COMPLETIONS) == len(set(COMPLETIONS)) == 15
    assert sorted({len(tokens) for tokens in COMPLETIONS}) == [1, 2, 3]
    torch.testing.assert_close(enumeration.probabilities(ListedPolicy()).sum(dim=1), torch.ones(PROMPTS).double())


@EVERY_SIZE
def test_every_group_is_listed_once(size):
    assert sum(orders for _, orders in enumeration.groups(size)) == 15**size
    assert dict(enumeration.groups(2))[3, 3] == 1
    assert dict(enumeration.groups(2))[3, 4] == 2


def test_the_true_gradient_is_that_of_finite_differences():
    policy, rewards_PO = ListedPolicy(), graded(seed=3)
    truth, values = true_gradient(policy, rewards_PO), []
    for move in (1e-5, -2e-5):
        with torch.no_grad():
            policy.table[1, 2, 0] += move
            values.append(float((enumeration.probabilities(policy) * rewards_PO).sum() / PROMPTS))
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(float(truth[1, 2, 0]), rel=1e-6)


@pytest.mark.sampled(6)
@EVERY_SIZE
@pytest.mark.parametrize("seed", [1, 2])
def test_rloo_summed_over_tokens_is_unbiased(size, seed):
    policy, rewards_PO = ListedPolicy(seed), graded(seed)
    equal(
        expected_gradient(summed(rloo(kl=NO_KL)), policy, rewards_PO, size),
        true_gradient(policy, rewards_PO),
    )


@pytest.mark.sampled(6)
@EVERY_SIZE
@pytest.mark.parametrize("seed", [1, 2])
def test_reinforce_summed_over_tokens_is_unbiased_but_for_its_size(size, seed):
    # A rollout is in its own baseline, which takes 1/G of its advantage away.
    policy, rewards_PO = ListedPolicy(seed), graded(seed)
    equal(
        expected_gradient(summed(reinforce()), policy, rewards_PO, size),
        (size - 1) / size * true_gradient(policy, rewards_PO),
    )


@pytest.mark.sampled(2)
@EVERY_SIZE
def test_grpo_without_std_summed_over_tokens_is_unbiased_but_for_its_size(size):
    policy, rewards_PO = ListedPolicy(), graded(seed=1)
    algorithm = replace(grpo(kl=NO_KL), advantage=outcome(group_centered), aggregation=enumeration.SUM)
    equal(
        expected_gradient(algorithm, policy, rewards_PO, size),
        (size - 1) / size * true_gradient(policy, rewards_PO),
    )


@pytest.mark.sampled(2)
@EVERY_SIZE
def test_dr_grpo_is_unbiased_but_for_its_size(size):
    # The constant length only makes it shorter.
    policy, rewards_PO = ListedPolicy(), graded(seed=1)
    equal(
        expected_gradient(dr_grpo(max_length=8), policy, rewards_PO, size),
        (size - 1) / (8 * size) * true_gradient(policy, rewards_PO),
    )


@pytest.mark.sampled(6)
@EVERY_SIZE
@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_ppo_unwhitened_is_unbiased_with_lambda_1_or_a_right_critic(size, lam):
    policy, rewards_PO = ListedPolicy(), graded(seed=1)
    algorithm = summed(ppo(gamma=1.0, lam=lam, whiten=False))
    critic_PS = enumeration.right_critic(policy, rewards_PO) if lam < 1 else None
    equal(
        expected_gradient(algorithm, policy, rewards_PO, size, critic_PS=critic_PS), true_gradient(policy, rewards_PO)
    )


def test_ppo_with_a_wrong_critic_and_lambda_below_1_is_biased():
    policy, rewards_PO = ListedPolicy(), graded(seed=1)
    found = expected_gradient(summed(ppo(gamma=1.0, whiten=False)), policy, rewards_PO, 2)
    assert enumeration.Bias.of(found, true_gradient(policy, rewards_PO)).error > 0.01


@pytest.mark.sampled(2)
@EVERY_SIZE
def test_the_mean_over_a_rollout_divides_what_it_teaches_by_its_length(size):
    # exactly (G-1)/G times sum_o pi(o) (r(o) - mean r) / |o| grad log pi(o), which is another direction
    policy, rewards_PO = ListedPolicy(), graded(seed=1)
    found = expected_gradient(reinforce(), policy, rewards_PO, size)
    probability_PO = enumeration.probabilities(policy)
    mean_P1 = (probability_PO * rewards_PO).sum(dim=1, keepdim=True).detach()
    length_O = torch.tensor([len(tokens) for tokens in COMPLETIONS])
    value = (probability_PO * (rewards_PO - mean_P1) / length_O).sum() / PROMPTS
    equal(found, (size - 1) / size * torch.autograd.grad(value, policy.table)[0])
    assert enumeration.Bias.of(found, true_gradient(policy, rewards_PO)).error > 0.1


@pytest.mark.slow
def test_with_right_and_wrong_only_up_to_three_rollouts_have_one_std():
    # 1 of 2: std 1/2; 1 of 3 or 2 of 3: std sqrt(2)/3. So dividing by it changes no direction yet.
    policy, rewards_PO = ListedPolicy(), (graded() > 0.5).double()
    truth = true_gradient(policy, rewards_PO)
    for size, std in ((2, 1 / 2), (3, 2**0.5 / 3)):
        found = expected_gradient(summed(grpo(kl=NO_KL)), policy, rewards_PO, size)
        torch.testing.assert_close(found, (size - 1) / size / std * truth, rtol=1e-5, atol=1e-9)


@pytest.fixture(scope="module")
def kl_gradients():
    return enumeration.kl_gradients(ListedPolicy(), ListedPolicy(seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k2", "exact"])
def test_k2_and_the_exact_kl_in_the_loss_pull_as_the_kl_of_decisions_does(kl_gradients, name):
    equal(kl_gradients[name, "loss"], enumeration.kl_gradient(ListedPolicy(), ListedPolicy(seed=1), whole=False))


@pytest.mark.slow
def test_nemo_rl_2506_k1_in_the_loss_does_not_pull(kl_gradients):
    assert float(kl_gradients["k1", "loss"].abs().max()) < 1e-14


def test_nemo_rl_2506_k3_in_the_loss_pulls_as_the_reverse_kl_does(kl_gradients):
    policy, reference = ListedPolicy(), ListedPolicy(seed=1)
    batch = enumeration.every_completion()
    now_BTV, then_BTV = (said.evaluate(batch).all_logprobs_BTV for said in (policy, reference))
    kl_BT = (then_BTV.detach().exp() * (then_BTV.detach() - now_BTV)).sum(-1) * batch.mask_BT
    value = (enumeration.probabilities(policy).detach().flatten() * kl_BT.sum(dim=1)).sum()
    equal(kl_gradients["k3", "loss"], torch.autograd.grad(-value / PROMPTS, policy.table)[0])


def test_k1_in_the_reward_pulls_as_the_kl_of_completions_does(kl_gradients):
    equal(kl_gradients["k1", "reward"], enumeration.kl_gradient(ListedPolicy(), ListedPolicy(seed=1), whole=True))


@pytest.mark.slow
def test_the_page_shows_what_the_kl_estimators_do():
    for line in enumeration.kl_table().splitlines():
        assert line in LINES


@pytest.mark.slow
def test_the_page_shows_the_bias_of_every_algorithm_in_groups_of_two_and_in_an_endless_step():
    policy, rewards_PO = ListedPolicy(), graded()
    truth = true_gradient(policy, rewards_PO)
    for name, algorithm in (enumeration.named() | enumeration.composed()).items():
        row = next(line for line in LINES if line.startswith(f"| {name} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        pair = enumeration.Bias.of(expected_gradient(algorithm, policy, rewards_PO, 2), truth)
        endless = enumeration.Bias.of(enumeration.endless_gradient(algorithm, policy, rewards_PO), truth)
        assert [cells[3], cells[5]] == [enumeration.shown(pair.error), enumeration.shown(endless.error, 2)], name


def test_every_named_algorithm_is_in_the_table():
    names = {name.strip("`").partition("`")[0] for name in enumeration.named()}
    assert names == set(ALGORITHMS)


@pytest.mark.slow
def test_the_table_of_the_page_is_that_of_the_script():
    for line in enumeration.family_table().splitlines():
        assert line in LINES
