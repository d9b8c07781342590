"""The expected signal of prompts, by hand and by frequencies."""

import itertools
import math

import pytest
import torch

from covey.core.prompt_signal import (
    back_to_the_data,
    discounted,
    draw_weights,
    draw_without_replacement,
    success_signal,
    variance_signal,
)


def test_an_observation_has_half_of_its_weight_after_the_half_life():
    assert discounted(8.0, 0, 10.0) == 8
    assert discounted(8.0, 10, 10.0) == 4
    assert discounted(8.0, 5, 10.0) == pytest.approx(8 / math.sqrt(2))


def test_the_signal_of_successes_is_largest_at_one_half():
    rates = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])
    assert success_signal(rates).tolist() == pytest.approx([0, 0.36, 1, 0.36, 0])


def test_the_signal_of_variances_is_relative_to_the_largest():
    assert variance_signal(torch.tensor([0.0, 1.0, 4.0])).tolist() == [0, 0.25, 1]
    assert variance_signal(torch.zeros(3)).tolist() == [0, 0, 0]


def test_the_floor_is_the_weight_without_signal():
    signal = torch.tensor([0.0, 0.5, 1.0])
    assert draw_weights(signal, 0.1).tolist() == pytest.approx([0.1, 0.55, 1])
    assert draw_weights(signal, 1.0).tolist() == [1, 1, 1]


def test_draws_without_replacement_have_their_probabilities():
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    uniform = torch.rand(8_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = [tuple(draw_without_replacement(weight, row, 2).tolist()) for row in uniform]
    assert {len(set(pair)) for pair in drawn} == {2}
    for pair in itertools.combinations(range(3), 2):
        a, b = (weight[place].item() / 8 for place in pair)
        exact = a * b / (1 - a) + b * a / (1 - b)
        assert drawn.count(pair) / len(drawn) == pytest.approx(exact, abs=0.02)


def test_weights_back_to_the_data_have_the_mean_one():
    weights = back_to_the_data(torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64))
    assert weights.tolist() == pytest.approx([10 * 3 / 13, 2 * 3 / 13, 3 / 13])
