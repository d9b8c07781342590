"""collate and Batch: padding is known by the mask alone, selecting rows loses nothing, actions may be undecided."""

import math

import numpy as np
import pytest
import torch

from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from helpers.tabular_policy import random_groups, rollout


def two_groups() -> list[Group]:
    return [
        Group(Start(0, "a"), [rollout([7, 0, 3], 1.0, context="x"), rollout([0], None, context="y")]),
        Group(Start(1, "b"), [rollout([5, 6], 0.5, context="z", end=EndReason.LENGTH)]),
    ]


def test_collate_by_hand():
    batch = collate(two_groups())
    assert batch.context == ("x", "y", "z")
    assert batch.actions_BT.tolist() == [[7, 0, 3], [0, 0, 0], [5, 6, 0]]
    assert batch.mask_BT.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert batch.behavior_logprobs_BT.tolist() == [[-1, -1, -1], [-1, 0, 0], [-1, -1, 0]]
    assert batch.reward_B.tolist() == [1.0, 0.0, 0.5]
    assert batch.valid_B.tolist() == [True, False, True]
    assert batch.truncated_B.tolist() == [False, False, True]
    assert batch.group_B.tolist() == [0, 0, 1]


def test_without_step_rewards_the_last_decision_earns_all():
    assert collate(two_groups()).rewards_BT.tolist() == [[0, 0, 1], [0, 0, 0], [0, 0.5, 0]]


def test_step_rewards_stand_at_their_decisions():
    groups = two_groups()
    groups[0].rollouts[0].step_rewards = np.array([0.25, 0.5, 0.25])
    groups[1].rollouts[0].step_rewards = [2.0, -1.5]
    batch = collate(groups)
    assert batch.rewards_BT.tolist() == [[0.25, 0.5, 0.25], [0, 0, 0], [2, -1.5, 0]]
    assert batch.rewards_BT.dtype == torch.float32
    assert batch.reward_B.tolist() == [1.0, 0.0, 0.5]


def test_actions_may_be_vectors():
    long, short = (rollout([0] * length, 1.0) for length in (2, 1))
    long.actions = np.array([[1, 2], [3, 4]], dtype=np.float32)
    short.actions = np.array([[5, 6]], dtype=np.float32)
    batch = collate([Group(Start(0, "a"), [short, long])])
    assert batch.actions_BT.tolist() == [[[5, 6], [0, 0]], [[1, 2], [3, 4]]]
    assert batch.actions_BT.dtype == torch.float32
    assert batch.select(torch.tensor([0])).actions_BT.tolist() == [[[5, 6]]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [([], "at least one rollout"), ([Group(Start(0, "a"), [rollout([], 1.0)])], "at least one decision")],
)
def test_nothing_to_collate_is_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        collate(groups)


def test_select_keeps_rows_and_cuts_columns_nobody_decided():
    part = collate(two_groups()).select(torch.tensor([2, 1]))
    assert part.context == ("z", "y")
    assert part.actions_BT.tolist() == [[5, 6], [0, 0]]
    assert part.mask_BT.tolist() == [[True, True], [True, False]]
    assert part.reward_B.tolist() == [0.5, 0.0]
    assert part.group_B.tolist() == [1, 0]
    assert len(part) == 2


def test_select_cuts_the_optional_tensors_too():
    batch = collate(two_groups())
    batch.advantages_BT = torch.arange(9.0).reshape(3, 3)
    part = batch.select(torch.tensor([1]))
    assert part.advantages_BT is not None
    assert part.advantages_BT.tolist() == [[3.0]]
    assert part.loss_weights_BT is None


def test_selecting_no_row_gives_an_empty_batch():
    part = collate(two_groups()).select(torch.tensor([], dtype=torch.int64))
    assert len(part) == 0
    assert part.context == ()


def test_pieces_of_a_batch_hold_every_row_once():
    batch = collate(random_groups())
    pieces: list[Batch] = [batch.select(rows) for rows in torch.arange(len(batch)).split(3)]
    assert torch.equal(torch.cat([piece.reward_B for piece in pieces]), batch.reward_B)
    assert sum(int(piece.mask_BT.sum()) for piece in pieces) == int(batch.mask_BT.sum())


def test_to_keeps_everything():
    batch = collate(two_groups())
    moved = batch.to(torch.device("meta"))
    assert moved.context == batch.context
    assert moved.mask_BT.device.type == moved.reward_B.device.type == "meta"
    assert moved.loss_weights_BT is None


def test_only_ends_of_the_episode_itself_are_final():
    assert [end.name for end in EndReason if end.is_final] == ["STOP", "TERMINATED"]


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


def test_collate_with_undecided_actions_by_hand():
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
