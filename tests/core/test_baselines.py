"""Advantages: numbers by hand, identities, and the groups that break other implementations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from covey.core.baselines import group_centered, group_zscore, leave_one_out

EVERY = pytest.mark.parametrize("advantage", [group_zscore, group_centered, leave_one_out])


def of(*rewards: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """One group in which every rollout counts; None or NaN is a rollout whose grading failed."""
    return groups([list(rewards)], dtype)


def groups(rewards: list[list[float]], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    flat = torch.tensor([reward for group in rewards for reward in group], dtype=dtype)
    number = torch.tensor([index for index, group in enumerate(rewards) for _ in group])
    return flat, number, ~flat.isnan()


def test_zscore_by_hand():
    # rewards 1 2 3 6: mean 12/4 = 3, deviations -2 -1 0 3, variance (4+1+0+9)/4 = 3.5, std sqrt(3.5) = 1.870829
    # -2 / 1.870829 = -1.069045, -1 / 1.870829 = -0.534522, 3 / 1.870829 = 1.603567
    expected = torch.tensor([-1.069045, -0.534522, 0.0, 1.603567], dtype=torch.float64)
    torch.testing.assert_close(group_zscore(*of(1, 2, 3, 6), eps=0), expected, rtol=0, atol=1e-6)


def test_zscore_of_right_and_wrong_by_hand():
    # 1 right of 4: mean 1/4, variance (9/16 + 3/16)/4 = 3/16, std sqrt(3)/4
    # 3/4 / (sqrt(3)/4) = sqrt(3), -1/4 / (sqrt(3)/4) = -1/sqrt(3)
    expected = torch.tensor([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], dtype=torch.float64)
    torch.testing.assert_close(group_zscore(*of(1, 0, 0, 0), eps=0), expected)


def test_zscore_adds_eps_to_the_std():
    # rewards 0 2: mean 1, std 1; 1 / (1 + 0.25) = 0.8
    torch.testing.assert_close(group_zscore(*of(0, 2), eps=0.25), torch.tensor([-0.8, 0.8], dtype=torch.float64))


def test_zscore_with_bessel_by_hand():
    # as above, variance 14/3 = 4.666667, std 2.160247; -2 / 2.160247 = -0.925820, 3 / 2.160247 = 1.388730
    expected = torch.tensor([-0.925820, -0.462910, 0.0, 1.388730], dtype=torch.float64)
    torch.testing.assert_close(group_zscore(*of(1, 2, 3, 6), eps=0, ddof=1), expected, rtol=0, atol=1e-6)


def test_default_std_is_the_populations():
    rewards = of(1, 2, 3, 6)
    assert group_zscore(*rewards)[3] == pytest.approx(3 / (math.sqrt(3.5) + 1e-6), rel=1e-12)


def test_mean_only_by_hand():
    # mean of 1 2 3 6 is 3
    assert group_centered(*of(1, 2, 3, 6)).tolist() == [-2.0, -1.0, 0.0, 3.0]


def test_leave_one_out_by_hand():
    # mean of the others: (2+3+6)/3 = 11/3, (1+3+6)/3 = 10/3, (1+2+6)/3 = 3, (1+2+3)/3 = 2
    expected = torch.tensor([1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(leave_one_out(*of(1, 2, 3, 6)), expected)


def test_groups_are_compared_with_themselves_only():
    # (1, 3) has mean 2; (10, 20, 60) has mean 30
    assert group_centered(*groups([[1, 3], [10, 20, 60]])).tolist() == [-1, 1, -20, -10, 30]


def test_rows_of_a_group_need_not_be_neighbours():
    reward = torch.tensor([1.0, 10.0, 3.0, 30.0])
    number = torch.tensor([0, 1, 0, 1])
    assert group_centered(reward, number, torch.ones(4, dtype=torch.bool)).tolist() == [-1, -10, 1, 10]


def test_zscore_is_mean_only_divided_by_the_std():
    rewards = groups([[1, 2, 3, 6], [0.5, -0.5, 2]])
    std = torch.cat([r.std(correction=0).expand(len(r)) for r in rewards[0].split([4, 3])])
    torch.testing.assert_close(group_zscore(*rewards, eps=0) * std, group_centered(*rewards))


def test_leave_one_out_is_mean_only_scaled():
    rewards = groups([[1, 2, 3, 6], [0.5, -0.5, 2]])
    scale = torch.tensor([4 / 3] * 4 + [3 / 2] * 3, dtype=torch.float64)
    torch.testing.assert_close(leave_one_out(*rewards), scale * group_centered(*rewards))


finite = st.floats(-1e3, 1e3, width=32)


@EVERY
@settings(max_examples=60)
@given(rewards=st.lists(st.lists(finite, min_size=1, max_size=9), min_size=1, max_size=4))
def test_advantages_of_a_group_sum_to_zero(advantage, rewards):
    reward_B, group_B, valid_B = groups(rewards)
    advantage_B = advantage(reward_B, group_B, valid_B)
    sums = torch.zeros(len(rewards), dtype=torch.float64).index_add(0, group_B, advantage_B)
    assert float(sums.abs().max()) <= 1e-9 * max(1.0, float(advantage_B.abs().max()), float(reward_B.abs().max()))


@settings(max_examples=60)
@given(rewards=st.lists(finite, min_size=2, max_size=9), shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_zscore_ignores_the_scale_and_origin_of_rewards(rewards, shift, scale):
    reward_B, group_B, valid_B = of(*rewards)
    if float(reward_B.max() - reward_B.min()) < 0.1:
        return
    before = group_zscore(reward_B, group_B, valid_B, eps=0)
    after = group_zscore(scale * reward_B + shift, group_B, valid_B, eps=0)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [0.0, 0.0, 0.0], [-0.7, -0.7, -0.7], [1e6, 1e6, 1e6]])
def test_equal_rewards_give_exactly_zero(advantage, rewards, dtype):
    assert advantage(*of(*rewards, dtype=dtype)).tolist() == [0.0] * 3


@EVERY
def test_sum_of_ten_tenths_equals_one(advantage):
    assert sum([0.1] * 10) != 1.0
    assert advantage(*of(sum([0.1] * 10), 1.0)).tolist() == [0.0, 0.0]


@EVERY
def test_a_small_true_difference_is_not_taken_for_rounding(advantage):
    low, high = advantage(*of(1.0, 1.0001)).tolist()
    assert low < 0 < high


@EVERY
def test_failed_rows_leave_their_group(advantage):
    nan = math.nan
    with_failures = advantage(*of(1, nan, 2, 3, nan, 6))
    assert with_failures[[1, 4]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(with_failures[[0, 2, 3, 5]], advantage(*of(1, 2, 3, 6)))


@EVERY
@pytest.mark.parametrize("hidden", [0.0, 1e9, math.inf, math.nan])
def test_what_stands_in_a_failed_row_is_never_read(advantage, hidden):
    reward_B = torch.tensor([1.0, hidden, 2.0])
    valid_B = torch.tensor([True, False, True])
    expected = advantage(torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.int64), torch.tensor([True, True]))
    assert advantage(reward_B, torch.zeros(3, dtype=torch.int64), valid_B)[[0, 2]].tolist() == expected.tolist()


@EVERY
def test_group_with_one_valid_row_teaches_nothing(advantage):
    assert advantage(*groups([[5.0, math.nan, math.nan], [1.0, 2.0]]))[:3].tolist() == [0.0, 0.0, 0.0]


@EVERY
def test_group_without_a_valid_row_teaches_nothing(advantage):
    both = advantage(*groups([[math.nan, math.nan], [1.0, 2.0]]))
    assert both[:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(both[2:], advantage(*of(1.0, 2.0)))


@EVERY
def test_dtype_is_kept(advantage):
    assert advantage(*of(1, 2, dtype=torch.float32)).dtype == torch.float32
