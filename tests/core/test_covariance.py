"""Covariance of log-probability and advantage, and the decisions chosen by it: numbers by hand."""

import math

import pytest
import torch

from covey.core.covariance import clip_cov, covariance, kl_cov

NAN = math.nan


def test_covariance_by_hand():
    # means over the three decisions: log pi -2, A 1. Centered log pi: 1, 0, -1; centered A: 2, -1, -1
    mask = torch.tensor([[True, True, False], [True, False, False]])
    logprobs = torch.tensor([[-1.0, -2.0, NAN], [-3.0, -7.0, math.inf]])
    advantages = torch.tensor([[3.0, 0.0, NAN], [0.0, 9.0, -math.inf]])
    found = covariance(logprobs, advantages, mask)
    assert found.dtype == torch.float64
    assert found.tolist() == [[2.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_nothing_decided_has_no_covariance():
    assert covariance(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("advantages", [(1.0, 0.0, -2.0), (-1.0, 0.5, 3.0)])
def test_its_mean_is_the_loss_of_entropy_per_size_of_a_step(advantages):
    """Ten samples in the proportions of a policy of three actions; a step adds eta A to the logits."""
    probability, eta = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 1e-5
    advantage = torch.tensor(advantages, dtype=torch.float64)
    samples = torch.tensor([[0] * 5 + [1] * 3 + [2] * 2])
    mean = covariance(probability.log()[samples], advantage[samples], samples >= 0).mean()
    after = (probability.log() + eta * advantage).softmax(0)
    change = -(after * after.log()).sum() + (probability * probability.log()).sum()
    assert float(change / eta) == pytest.approx(-float(mean), rel=1e-3)


VALUES = torch.tensor([[0.9, 1.0, 3.0, 5.0], [5.1, 2.0, 1.5, 4.0]])
MASK = torch.tensor([[True, True, True, True], [True, True, True, False]])  # N = 7
UNIFORM = torch.tensor([[0.1, 0.5, 0.4, 0.2], [0.0, 0.6, 0.3, 0.01]])


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [
        (0.0001, [(0, 3)]),  # at least one: the smallest number, 0.2, of those from 1 to 5
        (2.99 / 7, [(0, 3), (1, 2)]),  # floor(2.99) = 2: also 0.3
        (3.01 / 7, [(0, 2), (0, 3), (1, 2)]),
        (1.0, [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]),  # no more than there are
    ],
)
def test_clip_cov_by_hand(fraction, chosen):
    found = clip_cov(VALUES, MASK, UNIFORM, fraction=fraction, low=1.0, high=5.0)
    assert [tuple(place) for place in found.nonzero().tolist()] == chosen


def test_clip_cov_chooses_nothing_outside_of_the_bounds():
    assert not clip_cov(VALUES, MASK, UNIFORM, fraction=1.0, low=6.0, high=9.0).any()


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [(0.0001, [(1, 0)]), (2.99 / 7, [(0, 3), (1, 0)]), (3.01 / 7, [(0, 2), (0, 3), (1, 0)])],
)
def test_kl_cov_by_hand(fraction, chosen):
    found = kl_cov(VALUES, MASK, fraction=fraction)
    assert [tuple(place) for place in found.nonzero().tolist()] == chosen


def test_of_equal_covariances_kl_cov_chooses_the_first():
    found = kl_cov(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), fraction=0.5)
    assert found.tolist() == [[True, True, True], [False, False, False]]
    assert not kl_cov(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool), fraction=1.0).any()
