"""Log-ratios: numbers by hand, masking before clamping, finite gradients whatever stands at padding."""

import math

import pytest
import torch

from covey.core.ratios import (
    LOG_RATIO_LIMIT,
    ImportanceWeights,
    effective_sample_fraction,
    sequence_log_ratio,
    sequence_product_log_ratio,
    token_log_ratio,
)

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
    mask = torch.tensor([[True, True, True, True]])
    weight, capped, masked = ImportanceWeights(cap=3.0)(trainer, sampler, mask)
    torch.testing.assert_close(weight, torch.tensor([[2.0, 0.5, 3.0, 1.0]]))  # 2, 1/2, 9 -> 3, 1
    assert capped.tolist() == [[False, False, True, False]]
    assert not bool(masked.any())
    weight, capped, masked = ImportanceWeights(cap=1.5, low=0.75, high=5.0)(trainer, sampler, mask)
    torch.testing.assert_close(weight, torch.tensor([[1.5, 0.0, 0.0, 1.0]]))  # 2 -> 1.5, 1/2 and 9 are left out, 1
    assert capped.tolist() == [[True, False, False, False]]
    assert masked.tolist() == [[False, True, True, False]]


def test_importance_weight_of_a_rollout_by_hand():
    trainer, sampler = torch.tensor([[0.5, 0.2, 0.9]] * 2).log(), torch.tensor([[0.25, 0.4, 0.1]] * 2).log()
    mask = torch.tensor([[True, True, True], [True, True, False]])  # products 2 * 1/2 * 9 = 9 and 2 * 1/2 = 1
    torch.testing.assert_close(
        sequence_product_log_ratio(trainer, sampler, mask).exp(), torch.tensor([[9.0] * 3, [1.0] * 3])
    )
    weight, capped, masked = ImportanceWeights(cap=4.0, log_ratio=sequence_product_log_ratio)(trainer, sampler, mask)
    assert weight[mask].tolist() == pytest.approx([4.0, 4.0, 4.0, 1.0, 1.0])
    assert capped.tolist() == [[True] * 3, [False] * 3]
    weight, _, masked = ImportanceWeights(high=5.0, log_ratio=sequence_product_log_ratio)(trainer, sampler, mask)
    assert weight[mask].tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0, 1.0])
    assert masked.tolist() == [[True] * 3, [False] * 3]


def test_the_product_of_many_ratios_stays_finite():
    new, old = torch.zeros(1, 100), torch.full((1, 100), -3.0)
    mask = torch.ones(1, 100, dtype=torch.bool)
    assert float(sequence_product_log_ratio(new, old, mask)[0, 0]) == LOG_RATIO_LIMIT
    assert float(sequence_product_log_ratio(old, new, mask)[0, 0]) == -LOG_RATIO_LIMIT


def test_importance_weight_has_no_gradient():
    trainer = NEW.clone().requires_grad_()
    assert not ImportanceWeights(cap=2.0)(trainer, OLD, MASK).weight_BT.requires_grad


@pytest.mark.parametrize("hidden", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("weights", [ImportanceWeights(cap=2.0), ImportanceWeights(cap=0.5, low=0.4), ImportanceWeights(
    high=2.0, log_ratio=sequence_product_log_ratio)])  # fmt: skip
def test_importance_weight_never_reads_padding(hidden, weights):
    expected = weights(NEW, OLD, MASK)
    spoiled = weights(NEW.masked_fill(~MASK, hidden), OLD.masked_fill(~MASK, hidden), MASK)
    for one, other in zip(expected, spoiled, strict=True):
        assert torch.equal(one, other)
    assert not bool(expected.capped_BT[~MASK].any())
    assert not bool(expected.masked_BT[~MASK].any())


def test_a_weight_at_its_limit_is_neither_capped_nor_left_out():
    weight, capped, masked = ImportanceWeights(cap=1.0, low=1.0, high=1.0)(NEW, NEW, MASK)
    assert bool((weight == 1).all())
    assert not bool(capped.any())
    assert not bool(masked.any())


def test_effective_sample_fraction_by_hand():
    assert effective_sample_fraction(3.0, 3.0, 3) == 1.0  # equal weights
    assert effective_sample_fraction(5.0, 25.0, 4) == 0.25  # one weight is all
    assert effective_sample_fraction(4.0, 10.0, 2) == 0.8  # weights 1 and 3
