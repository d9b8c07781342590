"""collate and Batch: padding is known by the mask alone, and selecting rows loses nothing."""

import numpy as np
import pytest
import torch

from covey.data import Batch, EndReason, Group, Start, collate
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
