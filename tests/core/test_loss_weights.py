"""How losses are averaged: weights by hand, what they add up to, and Dr.GRPO from GRPO."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covey.core.baselines import group_centered, group_zscore
from covey.core.loss_weights import Counts, constant_length, count, sequence_mean, token_mean

# three rollouts of 3, 1 and 0 decisions; the first has a gap (a tool's answer) in its second column
MASK = torch.tensor([[True, False, True, True], [True, False, False, False], [False] * 4])
EVERY = pytest.mark.parametrize("aggregation", [sequence_mean, token_mean, constant_length(8)])


def test_count_by_hand():
    # the third row decided nothing, so it is not a rollout
    assert count(MASK) == Counts(rollouts=2, decisions=4)


def test_sequence_mean_by_hand():
    # 2 rollouts: 1/(2*3) on each of three decisions, 1/(2*1) on the only one
    expected = torch.tensor([[1 / 6, 0, 1 / 6, 1 / 6], [1 / 2, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(sequence_mean(MASK, count(MASK)), expected)


def test_token_mean_by_hand():
    assert token_mean(MASK, count(MASK)).tolist() == [[0.25, 0, 0.25, 0.25], [0.25, 0, 0, 0], [0, 0, 0, 0]]


def test_constant_length_by_hand():
    # 1 / (2 rollouts * 8)
    assert constant_length(8)(MASK, count(MASK)).tolist() == [
        [0.0625, 0, 0.0625, 0.0625],
        [0.0625, 0, 0, 0],
        [0, 0, 0, 0],
    ]


def test_constant_length_does_not_depend_on_how_long_rollouts_are():
    short, long = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 7, dtype=torch.bool)
    of = [constant_length(8)(mask, count(mask))[0, 0] for mask in (short, long)]
    assert of[0] == of[1] == 1 / 16


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any)


@settings(max_examples=50)
@given(lengths=lengths)
def test_means_add_up_to_one(lengths):
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    for aggregation in (sequence_mean, token_mean):
        assert float(aggregation(mask, count(mask)).sum()) == pytest.approx(1.0, abs=1e-6)
    share = sum(lengths) / (8 * sum(length > 0 for length in lengths))
    assert float(constant_length(8)(mask, count(mask)).sum()) == pytest.approx(share, abs=1e-6)


@settings(max_examples=50)
@example(lengths=[3, 0, 1, 2], cut=1, padding=2)
@given(lengths=lengths, cut=st.integers(0, 6), padding=st.integers(0, 3))
def test_weights_of_a_part_are_a_part_of_the_weights(lengths, cut, padding):
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    counts = count(mask)
    wider = torch.nn.functional.pad(mask, (0, padding))
    for aggregation in (sequence_mean, token_mean, constant_length(8)):
        whole = aggregation(mask, counts)
        assert torch.equal(torch.cat([aggregation(mask[:cut], counts), aggregation(mask[cut:], counts)]), whole)
        assert torch.equal(aggregation(wider, counts)[:, :7], whole)
        assert float(aggregation(wider, counts)[:, 7:].sum()) == 0


@EVERY
def test_nothing_decided_weighs_nothing(aggregation):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert aggregation(mask, count(mask)).tolist() == [[0.0] * 3] * 2


def test_dr_grpo_is_grpo_times_std_and_length():
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 4.0], dtype=torch.float64)
    group, valid = torch.tensor([0, 0, 0, 1, 1]), torch.ones(5, dtype=torch.bool)
    mask = torch.arange(6) < torch.tensor([6, 2, 3, 1, 4])[:, None]
    grpo = sequence_mean(mask, count(mask)) * group_zscore(reward, group, valid, eps=0)[:, None]
    dr_grpo = constant_length(10)(mask, count(mask)) * group_centered(reward, group, valid)[:, None]
    std = torch.tensor([reward[:3].std(correction=0)] * 3 + [reward[3:].std(correction=0)] * 2)
    length = mask.sum(dim=1)
    torch.testing.assert_close(grpo * (std * length / 10)[:, None], dr_grpo, rtol=1e-6, atol=1e-9)
