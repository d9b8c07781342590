"""Surrogates: numbers by hand, which bound takes the gradient away, identities at ratio 1."""

import math

import pytest
import torch
from torch import Tensor

from covey.core.policy_losses import cispo, policy_gradient, ppo_clip, shifted_clip_range
from covey.core.ratios import token_log_ratio


def clipped(ratio: list[float], advantage: list[float], **options: float) -> tuple[list[float], list[float], Tensor]:
    """Loss, gradient in the log-ratio, and where each bound was active."""
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    made = ppo_clip(log_ratio, log_ratio, torch.tensor([advantage], dtype=torch.float64), **options)
    made.loss_BT.sum().backward()
    assert log_ratio.grad is not None
    active = torch.stack([made.clipped_low_BT[0], made.clipped_high_BT[0]])
    return made.loss_BT[0].tolist(), log_ratio.grad[0].tolist(), active


def test_clipped_by_hand():
    # -min(rho A, clip(rho, 0.8, 1.2) A), gradient in log rho: -rho A where not clipped
    # rho 1.5, A 2:   -min(3, 2.4)     = -2.4, clipped above
    # rho 1.5, A -2:  -min(-3, -2.4)   =  3,   gradient 3
    # rho 0.5, A 2:   -min(1, 1.6)     = -1,   gradient -1
    # rho 0.5, A -2:  -min(-1, -1.6)   =  1.6, clipped below
    # rho 1.1, A 2:   -min(2.2, 2.2)   = -2.2, gradient -2.2
    loss, gradient, (low, high) = clipped([1.5, 1.5, 0.5, 0.5, 1.1], [2, -2, 2, -2, 2])
    assert loss == pytest.approx([-2.4, 3.0, -1.0, 1.6, -2.2])
    assert gradient == pytest.approx([0.0, 3.0, -1.0, 0.0, -2.2])
    assert low.tolist() == [False, False, False, True, False]
    assert high.tolist() == [True, False, False, False, False]


def test_asymmetric_clip_by_hand():
    # DAPO's bounds 0.8 and 1.28: rho 1.25 stays, 1.5 is cut to 1.28; rho 0.75 with A -1 is cut to 0.8
    loss, gradient, (low, high) = clipped([1.25, 1.5, 0.75], [1, 1, -1], clip_low=0.2, clip_high=0.28)
    assert loss == pytest.approx([-1.25, -1.28, 0.8])
    assert gradient == pytest.approx([-1.25, 0.0, 0.0])
    assert low.tolist() == [False, False, True]
    assert high.tolist() == [False, True, False]


def test_dual_clip_by_hand():
    # c 3, A -2: loss at most 6. rho 5: -min(-10, -2.4) = 10 -> 6, no gradient; rho 2.5: 5 stays; rho 0.5: 1.6 stays
    # A 2 is never touched: rho 5 gives -min(10, 2.4) = -2.4
    loss, gradient, (low, high) = clipped([5, 2.5, 0.5, 5], [-2, -2, -2, 2], dual_clip=3.0)
    assert loss == pytest.approx([6.0, 5.0, 1.6, -2.4])
    assert gradient == pytest.approx([0.0, 5.0, 0.0, 0.0])
    assert low.tolist() == [True, False, True, False]
    assert high.tolist() == [False, False, False, True]


def test_without_dual_clip_a_bad_action_is_pushed_down_without_bound():
    assert clipped([50.0], [-2])[0] == pytest.approx([100.0])


def test_zero_advantage_has_no_loss_and_is_not_counted_as_clipped():
    loss, gradient, active = clipped([5.0, 0.1], [0, 0], dual_clip=3.0)
    assert loss == [0.0, 0.0]
    assert gradient == [0.0, 0.0]
    assert not active.any()


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_bounds_are_reported_exactly_where_the_gradient_is_gone(dual_clip):
    ratio = [0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 2.9, 3.1] * 2
    advantage = [1.5] * 8 + [-1.5] * 8
    _, gradient, active = clipped(ratio, advantage, dual_clip=dual_clip)
    assert active.any(dim=0).tolist() == [g == 0 for g in gradient]


def test_score_function_by_hand():
    # -A log pi: -2 * -0.5 = 1, -(-1) * -3 = -3
    logprobs = torch.tensor([[-0.5, -3.0]], requires_grad=True)
    made = policy_gradient(logprobs, torch.zeros(1, 2), torch.tensor([[2.0, -1.0]]))
    made.loss_BT.sum().backward()
    assert made.loss_BT.tolist() == [[1.0, -3.0]]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, 1.0]]
    assert not made.clipped_low_BT.any()
    assert not made.clipped_high_BT.any()


def test_ratio_one_gives_reinforces_gradient():
    advantage = torch.tensor([[1.7, -0.4, 0.0]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    gradients = []
    for surrogate in (ppo_clip, policy_gradient):
        logprobs = torch.tensor([[-0.5, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
        log_ratio = token_log_ratio(logprobs, logprobs.detach(), mask)
        surrogate(logprobs, log_ratio, advantage).loss_BT.sum().backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], -advantage)


def test_clipped_loss_is_an_upper_bound_of_the_unclipped():
    ratio = torch.linspace(0.05, 4, 80, dtype=torch.float64).tolist()
    for sign in (1.0, -1.0):
        loss, _, _ = clipped(ratio, [sign] * 80)
        assert all(made >= -r * sign - 1e-12 for made, r in zip(loss, ratio, strict=True))


def test_loss_stays_finite_at_the_largest_log_ratio():
    log_ratio = token_log_ratio(torch.tensor([[math.inf]]), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    for advantage in (-3.0, 3.0):
        assert ppo_clip(log_ratio, log_ratio, torch.tensor([[advantage]])).loss_BT.isfinite().all()


def capped(ratio: list[float], advantage: list[float], **options: float) -> tuple[list[float], list[float], Tensor]:
    """As `clipped`, with log pi itself as the log-ratio's leaf, at an old probability of 1/2."""
    logprobs = (torch.tensor([ratio], dtype=torch.float64) / 2).log().requires_grad_()
    log_ratio = logprobs - math.log(0.5)
    made = cispo(logprobs, log_ratio, torch.tensor([advantage], dtype=torch.float64), **options)
    made.loss_BT.sum().backward()
    assert logprobs.grad is not None
    return made.loss_BT[0].tolist(), logprobs.grad[0].tolist(), torch.stack([made[1][0], made[2][0]])


def test_capped_score_by_hand():
    # -min(rho, 5) A log pi, gradient in log pi: -min(rho, 5) A; pi is rho / 2
    # rho 1.2, A 2: -2.4 log 0.6;  rho 1.2, A -2: the opposite;  rho 8, A 1: -5 log 4;  rho 8, A -1: 5 log 4
    loss, gradient, (low, high) = capped([1.2, 1.2, 8, 8], [2, -2, 1, -1], cap=5.0)
    assert loss == pytest.approx([-2.4 * math.log(0.6), 2.4 * math.log(0.6), -5 * math.log(4), 5 * math.log(4)])
    assert gradient == pytest.approx([-2.4, 2.4, -5.0, 5.0])
    assert low.tolist() == [False] * 4
    assert high.tolist() == [False, False, True, True]


def test_capped_score_with_a_least_weight():
    # rho 0.1 is raised to 0.5, whatever the advantage's sign
    _, gradient, (low, high) = capped([0.1, 0.1, 0.6], [1, -1, 1], cap=5.0, least=0.5)
    assert gradient == pytest.approx([-0.5, 0.5, -0.6])
    assert low.tolist() == [True, True, False]
    assert not high.any()


def test_capped_score_never_loses_a_gradient():
    # where the clipped ratio has none: far above for a good action, far below for a bad one
    ratio, advantage = [3.0, 0.2], [1, -1]
    assert clipped(ratio, advantage)[1] == [0.0, 0.0]
    assert all(gradient != 0 for gradient in capped(ratio, advantage, cap=1.2)[1])


def test_capped_score_without_a_cap_is_the_ratios_gradient():
    ratio, advantage = [0.1, 0.9, 1.0, 1.3, 7.0], [1.5, -0.5, 2, -1, 0.3]
    gradient = capped(ratio, advantage, cap=math.inf)[1]
    assert gradient == pytest.approx([-r * a for r, a in zip(ratio, advantage, strict=True)])


def test_the_clip_range_is_shifted_by_hand():
    assert shifted_clip_range(0.2, 0.28, 2.0) == pytest.approx((0.1, 0.56))
    assert shifted_clip_range(0.2, 0.28, 0.5) == pytest.approx((0.4, 0.14))
    assert shifted_clip_range(0.2, 0.28, 0.1) == pytest.approx((1.0, 0.028))  # the ratio is never below 0
    assert shifted_clip_range(0.2, 0.28, 1.0) == (0.2, 0.28)
