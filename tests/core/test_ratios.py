"""Log-ratios: numbers by hand, masking before clamping, finite gradients whatever stands at padding."""

from __future__ import annotations

import math

import pytest
import torch

from covey.core.ratios import LOG_RATIO_LIMIT, importance_weight, sequence_log_ratio, token_log_ratio

EVERY = pytest.mark.parametrize("log_ratio", [token_log_ratio, sequence_log_ratio])
NEW = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.0, 0.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.5, -1.0, -0.5], [-2.0, -1.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_token_by_hand():
    # -1 + 1.5 = 0.5, -2 + 1 = -1, 0; second row -3 + 2 = -1, then padding
    assert token_log_ratio(NEW, OLD, MASK).tolist() == [[0.5, -1.0, 0.0], [-1.0, 0.0, 0.0]]


def test_sequence_by_hand():
    # (0.5 - 1 + 0) / 3 = -1/6, on every decision; second row has one decision: -1 / 1
    expected = torch.tensor([[-1 / 6] * 3, [-1.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(sequence_log_ratio(NEW, OLD, MASK), expected)


def test_sequence_equals_token_where_all_token_ratios_are_equal():
    new = OLD + torch.tensor([[0.3], [-0.7]], dtype=torch.float64)
    torch.testing.assert_close(sequence_log_ratio(new, OLD, MASK), token_log_ratio(new, OLD, MASK))


def test_sequence_does_not_shrink_with_length():
    short, long = torch.full((1, 2), -0.01), torch.full((1, 200), -0.01)
    of = [sequence_log_ratio(x, torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool))[0, 0] for x in (short, long)]
    assert of[0] == pytest.approx(float(of[1]))


@EVERY
def test_a_row_without_decisions_is_zero(log_ratio):
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    assert log_ratio(NEW[:1], OLD[:1], nothing).tolist() == [[0.0, 0.0, 0.0]]


@EVERY
@pytest.mark.parametrize("gap", [100.0, -100.0, math.inf, -math.inf])
def test_clamped(log_ratio, gap):
    new = torch.zeros(1, 2)
    new[0] = gap
    limit = math.copysign(LOG_RATIO_LIMIT, gap)
    assert log_ratio(new, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)).tolist() == [[limit, limit]]


@EVERY
@pytest.mark.parametrize("hidden", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("side", ["new", "old", "both"])
def test_padding_changes_neither_value_nor_gradient(log_ratio, hidden, side):
    def value_and_gradient(new, old):
        new = new.clone().requires_grad_()
        value = log_ratio(new, old, MASK)
        value.exp().sum().backward()
        return value.detach(), new.grad

    spoiled_new = NEW.masked_fill(~MASK, hidden) if side != "old" else NEW
    spoiled_old = OLD.masked_fill(~MASK, hidden) if side != "new" else OLD
    clean, spoiled = value_and_gradient(NEW, OLD), value_and_gradient(spoiled_new, spoiled_old)
    assert torch.equal(clean[0], spoiled[0])
    assert torch.equal(clean[1], spoiled[1])
    assert bool((clean[1][~MASK] == 0).all())


def test_gradient_of_the_sequence_ratio_is_shared_by_its_decisions():
    new = NEW.clone().requires_grad_()
    sequence_log_ratio(new, OLD, MASK)[:, 0].sum().backward()
    expected = torch.tensor([[1 / 3] * 3, [1.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(new.grad, expected)


# ---- sampler against trainer ----


def test_importance_weight_by_hand():
    trainer, sampler = torch.tensor([[0.5, 0.2, 0.9, 0.4]]).log(), torch.tensor([[0.25, 0.4, 0.1, 0.4]]).log()
    weight, capped = importance_weight(trainer, sampler, torch.tensor([[True, True, True, True]]), 3.0)
    torch.testing.assert_close(weight, torch.tensor([[2.0, 0.5, 3.0, 1.0]]))  # 2, 1/2, 9 -> 3, 1
    assert capped.tolist() == [[False, False, True, False]]


def test_importance_weight_has_no_gradient():
    trainer = NEW.clone().requires_grad_()
    weight, _ = importance_weight(trainer, OLD, MASK, 2.0)
    assert not weight.requires_grad


@pytest.mark.parametrize("hidden", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("cap", [2.0, 0.5])
def test_importance_weight_never_reads_padding(hidden, cap):
    expected, capped = importance_weight(NEW, OLD, MASK, cap)
    spoiled, also_capped = importance_weight(NEW.masked_fill(~MASK, hidden), OLD.masked_fill(~MASK, hidden), MASK, cap)
    assert torch.equal(spoiled, expected)
    assert torch.equal(also_capped, capped)
    assert not bool(capped[~MASK].any())


def test_a_weight_at_its_cap_is_not_counted_as_capped():
    weight, capped = importance_weight(NEW, NEW, MASK, 1.0)
    assert bool((weight == 1).all())
    assert not bool(capped.any())
