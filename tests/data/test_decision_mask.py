"""Rollouts with actions that the policy did not decide: what collate makes of them, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from covey.data import EndReason, Group, Rollout, Start, collate
from helpers.tabular_policy import random_groups, rollout


def tool_rollout(**fields) -> Rollout:
    """Decisions 7 and 3, the output 9 9 of a tool, decision 4, and an output 8 after it."""
    known = {
        "context": "x",
        "actions": [7, 3, 9, 9, 4, 8],
        "behavior_logprobs": [-0.5, -1.0, math.nan, -math.inf, -2.0, -7.0],
        "end": EndReason.LENGTH,
        "decided": [True, True, False, False, True, False],
        "reward": 1.5,
    }
    return Rollout(**known | fields)


def group(*rollouts: Rollout) -> list[Group]:
    return [Group(Start(0, "a"), list(rollouts))]


def test_collate_by_hand():
    batch = collate(group(tool_rollout(), rollout([5, 6, 5], 0.25)))
    assert batch.actions_BT.tolist() == [[7, 3, 9, 9, 4, 8], [5, 6, 5, 0, 0, 0]]
    assert batch.mask_BT.tolist() == [[True, True, False, False, True, False], [True, True, True, False, False, False]]
    assert batch.behavior_logprobs_BT.tolist() == [[-0.5, -1, 0, 0, -2, 0], [-1, -1, -1, 0, 0, 0]]
    assert batch.rewards_BT.tolist() == [[0, 0, 0, 0, 1.5, 0], [0, 0, 0.25, 0, 0, 0]]
    assert batch.step_end_BT.nonzero().tolist() == [[0, 4], [1, 2]]
    assert batch.reward_B.tolist() == [1.5, 0.25]
    assert batch.truncated_B.tolist() == [True, False]


@pytest.mark.parametrize("as_what", [list, tuple, np.array, torch.tensor], ids=lambda form: form.__name__)
def test_a_mask_may_be_any_sequence(as_what):
    item = tool_rollout(decided=as_what([True, True, False, False, True, False]))
    assert collate(group(item)).mask_BT.tolist() == [[True, True, False, False, True, False]]
    assert item.decisions == 3


def test_a_mask_of_decisions_alone_changes_nothing():
    plain = random_groups()
    masked = random_groups()
    for item in (item for made in masked for item in made.rollouts):
        item.decided = [True] * len(item.actions)
        assert item.decisions == len(item.actions)
    batch, expected = collate(masked), collate(plain)
    for name in batch.__dataclass_fields__:
        found, known = getattr(batch, name), getattr(expected, name)
        if isinstance(found, torch.Tensor):
            assert found.dtype == known.dtype
            assert torch.equal(found, known)
        else:
            assert found == known


def test_rewards_and_steps_stand_at_decisions():
    item = tool_rollout(step_rewards=[0.25, 0.5, 0, 0.0, 0.75, 0], step_ends=[1, 4])
    batch = collate(group(item))
    assert batch.rewards_BT.tolist() == [[0.25, 0.5, 0, 0, 0.75, 0]]
    assert batch.step_end_BT.nonzero().tolist() == [[0, 1], [0, 4]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decided": [False] * 6}, "every rollout needs at least one decision"),
        ({"decided": [True] * 5}, "a rollout of 6 actions has a decision mask of 5"),
        ({"decided": [True] * 7}, "a rollout of 6 actions has a decision mask of 7"),
        ({"step_ends": [2, 4]}, "rollout 1 has a reasoning step that ends at action 2, which the policy did not dec"),
        ({"step_ends": [1, 5]}, "rollout 1 has a reasoning step that ends at action 5"),
        ({"step_ends": [1, 6]}, "a rollout of 6 actions has steps that end at"),
        ({"step_rewards": [0, 0, 0, 1, 0, 0]}, "rollout 1 has a step reward at action 3, which the policy did not dec"),
        ({"step_rewards": [0, 0, 0, 0, 0, math.nan]}, "rollout 1 has a step reward at action 5"),
    ],
)
def test_what_only_a_decision_can_have_is_refused_elsewhere(fields, message):
    with pytest.raises(ValueError, match=message):
        collate(group(rollout([1, 2, 3, 4, 5, 6], 1.0), tool_rollout(**fields)))


def test_vectors_may_be_undecided_too():
    item = tool_rollout(actions=np.arange(12, dtype=np.float32).reshape(6, 2))
    batch = collate(group(item))
    assert batch.actions_BT.tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]]
    assert batch.mask_BT.tolist() == [[True, True, False, False, True, False]]


def test_select_keeps_the_gap_and_cuts_what_follows_the_last_decision():
    batch = collate(group(rollout([1] * 9, 1.0), tool_rollout()))
    part = batch.select(torch.tensor([1]))
    assert part.actions_BT.tolist() == [[7, 3, 9, 9, 4]]
    assert part.mask_BT.tolist() == [[True, True, False, False, True]]
    assert part.rewards_BT.tolist() == [[0, 0, 0, 0, 1.5]]
