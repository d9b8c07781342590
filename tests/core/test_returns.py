"""Returns and GAE: numbers by hand, a plain loop, another library's numbers, and the identities of lambda 0 and 1."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from covey.core.returns import (
    clipped_squared_error,
    discounted_returns,
    explained_variance,
    gae,
    squared_error,
)

# Pieces of episodes: end, rewards, values, value after the last decision, advantages, returns (gamma 0.97, lambda 0.9).
# The last two are stable-baselines3 2.9.2's, printed by tests/helpers/stable_baselines_gae.py.
STABLE_BASELINES = [
    (
        "terminated",
        [1.25, -1.0, 1.5, -1.75, 0.5, -1.5, -2.0, -0.5],
        [-0.375, 0.375, 1.0, -0.875, 0.625, -0.875, -1.75, -0.875],
        0.0,
        [-0.894159, -3.302301, -3.318787, -3.402104, -3.58918, -2.99591, -0.771375, 0.375],
        [-1.269159, -2.927301, -2.318787, -4.277104, -2.96418, -3.87091, -2.521375, -0.5],
    ),
    (
        "terminated",
        [-1.75, -1.25, 0.25, -0.75, 0.0],
        [-0.25, -1.375, 1.875, -0.75, 0.75],
        0.0,
        [-2.881361, -0.054538, -2.288989, 0.07275, -0.75],
        [-3.131361, -1.429538, -0.413989, -0.67725, 0.0],
    ),
    (
        "cut",
        [0.75, -1.75, 1.75],
        [1.75, 2.0, -1.5],
        1.625,
        [0.07426, -0.991684, 4.82625],
        [1.82426, 1.008317, 3.32625],
    ),
    ("terminated", [-1.25], [0.625], 0.0, [-1.875], [-1.25]),
    ("truncated", [1.25], [1.0], -1.875, [-1.56875], [-0.56875]),
    ("terminated", [-2.0], [1.125], 0.0, [-3.125], [-2.0]),
    (
        "cut",
        [-0.25, -1.0, 1.0, -0.25, 0.0],
        [0.625, 1.5, -2.0, 1.875, -0.75],
        0.625,
        [-0.733724, -1.504839, 3.362155, -1.668494, 1.35625],
        [-0.108724, -0.004839, 1.362155, 0.206506, 0.60625],
    ),
]


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def decided(*marks: int) -> Tensor:
    return torch.tensor([marks], dtype=torch.bool)


def loop_sums(values: list[float], factor: float) -> list[float]:
    return [sum(factor ** (k - t) * values[k] for k in range(t, len(values))) for t in range(len(values))]


def loop_gae(rewards, values, following, gamma, lam) -> list[float]:
    advantages, later = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        next_value = following if t == len(rewards) - 1 else values[t + 1]
        later = rewards[t] + gamma * next_value - values[t] + gamma * lam * later
        advantages[t] = later
    return advantages


def test_discounted_sums_by_hand():
    # 1 + (2 + 4/2)/2 = 3, 2 + 4/2 = 4, 4
    assert discounted_returns(row(1, 2, 4), decided(1, 1, 1), 0.5).tolist() == [[3, 4, 4]]


def test_discounted_sums_step_over_what_was_not_decided():
    # the decisions earned 1, 2 and 4: as above, for a gap is not a time
    found = discounted_returns(row(math.nan, 1, 7, 2, math.inf, 4, 9), decided(0, 1, 0, 1, 0, 1, 0), 0.5)
    assert found.tolist() == [[0, 3, 0, 4, 0, 4, 0]]


def test_gae_by_hand():
    # gamma 1/2, lambda 1/2, so their product is 1/4; values 2 4 8, then 6 after the last decision
    # delta: 1 + 4/2 - 2 = 1, 2 + 8/2 - 4 = 2, 3 + 6/2 - 8 = -2
    # A: 1 + (2 - 2/4)/4 = 1.375, 2 - 2/4 = 1.5, -2; returns A + V: 3.375, 5.5, 6
    advantages, returns = gae(
        row(1, 2, 3), row(2, 4, 8), torch.tensor([6.0]).double(), decided(1, 1, 1), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [[1.375, 1.5, -2]]
    assert returns.tolist() == [[3.375, 5.5, 6]]


def test_gae_discounts_once_by_gamma_and_its_sum_by_both():
    # gamma 1/2, lambda 1: product 1/2. delta: 0 + 4/2 - 0 = 2, 0 + 0 - 4 = -4; A: 2 - 4/2 = 0, -4
    # swapped, gamma 1, lambda 1/2: delta 4, -4; A: 4 - 4/2 = 2, -4
    for gamma, lam, first in ((0.5, 1.0, 0.0), (1.0, 0.5, 2.0)):
        advantages, _ = gae(row(0, 0), row(0, 4), torch.zeros(1).double(), decided(1, 1), gamma=gamma, lam=lam)
        assert advantages.tolist() == [[first, -4.0]]


def test_a_truncated_row_bootstraps_and_a_terminated_one_does_not():
    # one decision worth 1 where the critic says 3: 1 - 3 = -2 if that was the end; 1 + 0.9 * 5 - 3 = 2.5 if 5 follows
    both = torch.ones(2, 1).double()
    advantages, returns = gae(both, 3 * both, torch.tensor([0.0, 5.0]).double(), both.bool(), gamma=0.9, lam=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[-2.0], [2.5]]).double())
    torch.testing.assert_close(returns, torch.tensor([[1.0], [5.5]]).double())


def test_what_follows_comes_after_a_rows_own_last_decision():
    # rows of 1 and 3 decisions with an undecided column after each: as each of them alone
    mask = torch.tensor([[0, 1, 0, 0, 0], [1, 1, 0, 1, 0]]).bool()
    hidden = torch.full((2, 5), math.nan, dtype=torch.float64)
    rewards, values = hidden.clone(), hidden.clone()
    rewards[mask] = torch.tensor([1.0, 1, 2, 3]).double()
    values[mask] = torch.tensor([2.0, 2, 4, 8]).double()
    advantages, returns = gae(rewards, values, torch.tensor([8.0, 6.0]).double(), mask, gamma=0.5, lam=0.5)
    # first row: 1 + 8/2 - 2 = 3; the second is that of test_gae_by_hand
    assert advantages.tolist() == [[0, 3, 0, 0, 0], [1.375, 1.5, 0, -2, 0]]
    assert returns.tolist() == [[0, 5, 0, 0, 0], [3.375, 5.5, 0, 6, 0]]


def test_a_row_without_decisions_has_no_advantage():
    advantages, returns = gae(row(1, 2), row(3, 4), torch.tensor([5.0]).double(), decided(0, 0), gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [[0, 0]]


def test_gae_is_stable_baselines():
    longest = max(len(piece[1]) for piece in STABLE_BASELINES)
    padded = [
        torch.tensor([piece[i] + [9.0] * (longest - len(piece[i])) for piece in STABLE_BASELINES]) for i in (1, 2, 4, 5)
    ]
    mask = torch.arange(longest) < torch.tensor([len(piece[1]) for piece in STABLE_BASELINES])[:, None]
    following = torch.tensor([piece[3] for piece in STABLE_BASELINES])
    advantages, returns = gae(padded[0], padded[1], following, mask, gamma=0.97, lam=0.9)
    assert {piece[0] for piece in STABLE_BASELINES} == {"terminated", "truncated", "cut"}
    torch.testing.assert_close(advantages[mask], padded[2][mask], rtol=0, atol=2e-6)
    torch.testing.assert_close(returns[mask], padded[3][mask], rtol=0, atol=2e-6)


number = st.floats(-10, 10, width=32)
column = st.tuples(number, number, st.booleans())
rows = st.lists(st.tuples(st.lists(column, min_size=1, max_size=11), number), min_size=1, max_size=4)
share = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])
PROPERTY = settings(max_examples=80)


def padded(given_rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards_BT, values_BT, next_value_B and mask_BT with holes; NaN wherever nothing was decided."""
    width = max(len(columns) for columns, _ in given_rows)
    shape = (len(given_rows), width)
    rewards, values = (torch.full(shape, math.nan, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(shape, dtype=torch.bool)
    for b, (columns, _) in enumerate(given_rows):
        for t, (reward, value, mark) in enumerate(columns):
            if mark:
                rewards[b, t], values[b, t], mask[b, t] = reward, value, True
    return rewards, values, torch.tensor([following for _, following in given_rows]).double(), mask


@PROPERTY
@given(given_rows=rows, factor=share)
def test_discounted_sums_are_those_of_a_plain_loop(given_rows, factor):
    rewards, _, _, mask = padded(given_rows)
    found = discounted_returns(rewards, mask, factor)
    assert bool((found[~mask] == 0).all())
    for b, (columns, _) in enumerate(given_rows):
        expected = loop_sums([reward for reward, _, mark in columns if mark], factor)
        assert found[b, mask[b]].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@PROPERTY
@given(given_rows=rows, gamma=share, lam=share)
def test_gae_is_that_of_a_plain_loop(given_rows, gamma, lam):
    rewards, values, following, mask = padded(given_rows)
    advantages, returns = gae(rewards, values, following, mask, gamma=gamma, lam=lam)
    assert bool((advantages[~mask] == 0).all())
    assert bool((returns[~mask] == 0).all())
    for b, (columns, after) in enumerate(given_rows):
        made = [(reward, value) for reward, value, mark in columns if mark]
        expected = loop_gae([r for r, _ in made], [v for _, v in made], after, gamma, lam)
        assert advantages[b, mask[b]].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-10)
        assert returns[b, mask[b]].tolist() == pytest.approx(
            [a + v for a, (_, v) in zip(expected, made, strict=True)], rel=1e-12, abs=1e-10
        )


@PROPERTY
@given(given_rows=rows, gamma=share)
def test_lambda_0_is_one_step_ahead_and_lambda_1_the_return_minus_the_value(given_rows, gamma):
    rewards, values, following, mask = padded(given_rows)
    one_step, _ = gae(rewards, values, following, mask, gamma=gamma, lam=0.0)
    whole, returns = gae(rewards, values, following, mask, gamma=gamma, lam=1.0)
    for b in range(len(mask)):
        r, v = rewards[b, mask[b]].tolist(), values[b, mask[b]].tolist()
        if not r:
            continue
        deltas = [r[t] + gamma * ([*v, following[b].item()][t + 1]) - v[t] for t in range(len(r))]
        assert one_step[b, mask[b]].tolist() == pytest.approx(deltas, abs=1e-12)
        # the return of the row, with the critic's word for what comes after it
        promised = loop_sums([*r, following[b].item()], gamma)[:-1]
        assert returns[b, mask[b]].tolist() == pytest.approx(promised, rel=1e-12, abs=1e-10)
        assert whole[b, mask[b]].tolist() == pytest.approx(
            [g - value for g, value in zip(promised, v, strict=True)], rel=1e-12, abs=1e-10
        )


def test_a_critic_that_is_right_leaves_no_advantage():
    rewards, mask = row(1, 2, 4, 8), decided(1, 1, 1, 1)
    values = discounted_returns(rewards, mask, 0.9)
    advantages, returns = gae(rewards, values, torch.zeros(1).double(), mask, gamma=0.9, lam=0.7)
    torch.testing.assert_close(advantages, torch.zeros_like(values), rtol=0, atol=1e-14)
    torch.testing.assert_close(returns, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_episodes_stay_precise(dtype):
    # 1 + g + ... + g^n for the last 0, 1, 499 and 999 of 1,000 decisions
    found = discounted_returns(torch.ones(1, 1000, dtype=dtype), torch.ones(1, 1000, dtype=torch.bool), 0.99)
    assert found.dtype == dtype
    for left in (1, 2, 500, 1000):
        assert float(found[0, -left]) == pytest.approx((1 - 0.99**left) / 0.01, rel=1e-6)


def test_the_shape_of_the_padding_changes_nothing():
    rewards, values, after = row(1, 2, 3), row(2, 4, 8), torch.tensor([6.0]).double()
    expected = gae(rewards, values, after, decided(1, 1, 1), gamma=0.9, lam=0.8)
    pad = torch.nn.functional.pad
    wider = gae(pad(rewards, (0, 4)), pad(values, (0, 4)), after, pad(decided(1, 1, 1), (0, 4)), gamma=0.9, lam=0.8)
    for narrow, wide in zip(expected, wider, strict=True):
        torch.testing.assert_close(wide[:, :3], narrow)


def test_squared_error_by_hand():
    assert squared_error(row(1, 3), row(2, 0), row(9, 9)).tolist() == [[1, 9]]


def test_clipped_squared_error_by_hand():
    # all had said 0 and may move by 1; the right answer is 4
    # to 3: near is 1, the errors are 1 and 9: 9. To 0.5: near is 0.5 too: 12.25. To -2: near is -1, 36 and 25: 36
    found = clipped_squared_error(row(3, 0.5, -2), row(4, 4, 4), row(0, 0, 0), clip=1.0)
    assert found.tolist() == [[9, 12.25, 36]]


def test_value_clip_takes_the_gradient_of_going_too_far_only():
    # as above: the first went too far toward the answer (no gradient), the third too far away from it (pulled back)
    values = row(3, 0.5, -2).requires_grad_()
    clipped_squared_error(values, row(4, 4, 4), row(0, 0, 0), clip=1.0).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0, 2 * (0.5 - 4), 2 * (-2 - 4)]]


def test_a_wide_value_clip_is_none():
    values, returns, old = row(3, 0.5, -2), row(4, 4, 4), row(0, 0, 0)
    torch.testing.assert_close(
        clipped_squared_error(values, returns, old, clip=100.0), squared_error(values, returns, old)
    )


def test_explained_variance_by_hand():
    # returns 1 2 3 4 have variance 1.25; errors 0.5 0 0 0.5 have mean 0.25, variance (4 * 0.0625)/4 = 0.0625
    # 1 - 0.0625/1.25 = 0.95
    returns, mask = row(1, 2, 3, 4, 99), decided(1, 1, 1, 1, 0)
    assert float(explained_variance(row(0.5, 2, 3, 3.5, math.nan), returns, mask)) == pytest.approx(0.95)


def test_explained_variance_of_what_is_known():
    returns, mask = row(1, 2, 4), decided(1, 1, 1)
    assert float(explained_variance(returns, returns, mask)) == 1.0
    # a constant foresees nothing, and being wrong by the same everywhere is not a fault of the variance
    assert float(explained_variance(row(7, 7, 7), returns, mask)) == pytest.approx(0.0, abs=1e-15)
    assert float(explained_variance(returns + 5, returns, mask)) == pytest.approx(1.0)
    # worse than a constant: errors 2, 4, 8 have four times the variance
    assert float(explained_variance(-returns, returns, mask)) == pytest.approx(-3.0)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_explained_variance_of_equal_returns_is_zero(count):
    returns = torch.full((1, count), 0.1)
    values = torch.arange(float(count))[None]
    assert float(explained_variance(values, returns, torch.ones(1, count, dtype=torch.bool))) == 0.0


def test_explained_variance_of_nothing_is_zero():
    assert float(explained_variance(row(1), row(1), decided(0))) == 0.0
