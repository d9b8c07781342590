"""Losses of reward models and the quality of scores: by hand, against other libraries' code, and as properties."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss, ForTokenClassification

from covey.core.calibration import auc, reliability
from covey.core.reward_model_losses import (
    AGGREGATES,
    aggregate,
    bradley_terry,
    cross_entropy,
    squared_error,
    step_differences,
)

SCORES = st.floats(-30, 30)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_by_hand() -> None:
    """-log(1 / (1 + e^-1)) = log(1 + e^-1) = 0.31326; with the margin 3 it is log(1 + e^2) = 2.12693."""
    loss = bradley_terry(numbers(2.0, 0.5), numbers(1.0, 0.5))
    assert loss.tolist() == pytest.approx([0.3132617, math.log(2)])
    assert bradley_terry(numbers(2.0), numbers(1.0), numbers(3.0)).tolist() == pytest.approx([2.1269280])
    # 0.01 (2 + 1)^2 = 0.09
    assert bradley_terry(numbers(2.0), numbers(1.0), center=0.01).tolist() == pytest.approx([0.4032617])


@given(st.lists(st.tuples(SCORES, SCORES, st.floats(0, 5)), min_size=1, max_size=5), st.floats(0, 1))
@example([(2.0, 1.0, 0.5), (-1.0, 3.0, 0.0)], 0.3)
def test_bradley_terry_is_logistic_regression_on_the_gap(
    pairs: list[tuple[float, float, float]], center: float
) -> None:
    chosen, rejected, margin = (numbers(*column) for column in zip(*pairs, strict=True))
    regression = nn.functional.binary_cross_entropy_with_logits(
        chosen - rejected - margin, torch.ones_like(chosen), reduction="none"
    )
    expected = regression + center * (chosen**2 + 2 * chosen * rejected + rejected**2)
    torch.testing.assert_close(bradley_terry(chosen, rejected, margin, center=center), expected)


def test_the_gradient_of_bradley_terry_raises_the_chosen_score() -> None:
    """d/dr_chosen = -sigmoid(-(gap)): -0.26894 for a gap of 1, and the opposite for the rejected one."""
    chosen, rejected = numbers(2.0).requires_grad_(), numbers(1.0).requires_grad_()
    bradley_terry(chosen, rejected).sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.2689414])
    assert rejected.grad.tolist() == pytest.approx([0.2689414])


def test_cross_entropy_by_hand() -> None:
    """sigmoid(log 3) = 3/4: -log(3/4) = 0.28768 for the label 1, -log(1/4) = 1.38629 for 0, their mean for 1/2."""
    logit = numbers(math.log(3)).expand(3)
    assert cross_entropy(logit, numbers(1.0, 0.0, 0.5)).tolist() == pytest.approx([0.2876821, 1.3862944, 0.8369882])
    # No infinity for scores that are far off.
    assert cross_entropy(numbers(-1000.0, 1000.0), numbers(1.0, 0.0)).tolist() == [1000.0, 1000.0]


@given(st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=6))
@example([(1.0, True), (-2.0, True), (0.5, False)])
def test_losses_are_those_of_transformers(items: list[tuple[float, bool]]) -> None:
    logit = numbers(*(score for score, _ in items))
    label = numbers(*(float(right) for _, right in items))
    two = torch.stack([torch.zeros_like(logit), logit], dim=1)
    expected = ForTokenClassification(two.float()[None], label.long()[None], type("Config", (), {"num_labels": 2})())
    torch.testing.assert_close(cross_entropy(logit, label).mean().float(), expected, rtol=1e-5, atol=1e-6)
    config = type("Config", (), {"num_labels": 1, "problem_type": "regression"})()
    expected = ForSequenceClassificationLoss(label, logit[:, None], config)
    torch.testing.assert_close(squared_error(logit, label).mean(), expected)


def test_aggregates_by_hand() -> None:
    scores = numbers(0.5, 0.25, 0.75)
    found = {how: float(aggregate(scores, how)) for how in AGGREGATES}
    assert found == {"min": 0.25, "product": 0.09375, "mean": 0.5, "last": 0.75}


def test_step_differences_by_hand() -> None:
    assert step_differences(numbers(0.5, 0.25, 0.75)).tolist() == [0.5, -0.25, 0.5]
    assert step_differences(numbers(0.5)).tolist() == [0.5]


def test_auc_by_hand() -> None:
    """Positives 0.9 and 0.4, negatives 0.4 and 0.1: (1 + 1 + 1/2 + 1) / 4."""
    assert auc(numbers(0.9, 0.4, 0.4, 0.1), torch.tensor([True, True, False, False])) == 0.875
    assert auc(numbers(0.9, 0.4), torch.tensor([True, True])) is None
    assert auc(numbers(0.9, 0.4), torch.tensor([False, False])) is None


@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=12))
@example([(1, True), (1, False), (0, False), (2, True)])
def test_auc_counts_the_ordered_pairs(items: list[tuple[int, bool]]) -> None:
    positive = [score for score, right in items if right]
    negative = [score for score, right in items if not right]
    ordered = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    found = auc(numbers(*(float(score) for score, _ in items)), torch.tensor([right for _, right in items]))
    assert found == (pytest.approx(sum(ordered) / len(ordered)) if ordered else None)


def test_calibration_by_hand() -> None:
    """Bins of 1/2: (0.2, 0.4 | 1 of 2 right) and (0.9, 1.0 | 1 of 2): 1/2 |0.5 - 0.3| + 1/2 |0.5 - 0.95| = 0.325."""
    found = reliability(numbers(0.2, 0.4, 0.9, 1.0), torch.tensor([True, False, True, False]), bins=2)
    assert found.count_K.tolist() == [2, 2]
    assert found.predicted_K.tolist() == pytest.approx([0.3, 0.95])
    assert found.observed_K.tolist() == [0.5, 0.5]
    assert found.error == pytest.approx(0.325)
    empty = reliability(numbers(0.9), torch.tensor([True]), bins=10)
    assert empty.count_K.tolist() == [0] * 9 + [1]
    assert empty.error == pytest.approx(0.1)
    uneven = reliability(numbers(0.2, 0.3, 0.1, 0.9), torch.tensor([False, False, True, True]), bins=2)
    assert uneven.error == pytest.approx(0.75 * (1 / 3 - 0.2) + 0.25 * 0.1)


def test_perfectly_calibrated_predictions_have_no_error() -> None:
    probability = numbers(*[0.25] * 4, *[0.75] * 4)
    right = torch.tensor([True, False, False, False, True, True, True, False])
    assert reliability(probability, right).error == pytest.approx(0)
