"""From groups of rollouts to one padded batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.data.types import Batch, Group, Rollout


def collate(groups: list[Group]) -> Batch:
    """Stack every rollout of `groups` into a Batch of [B, T] decisions, padded on the right.

    Padding is marked by `mask_BT` alone: no token id has a special meaning here.

    Raises:
        ValueError: if there is no rollout, a rollout without a decision, or a step that ends outside its rollout.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise ValueError("collate needs at least one rollout")
    lengths = [len(rollout.actions) for rollout in rollouts]
    if min(lengths) == 0:
        raise ValueError("every rollout needs at least one decision")
    rewards = [0.0 if rollout.reward is None else rollout.reward for rollout in rollouts]
    earned = [
        [0.0] * (length - 1) + [reward] if rollout.step_rewards is None else rollout.step_rewards
        for rollout, length, reward in zip(rollouts, lengths, rewards, strict=True)
    ]
    group_sizes = torch.tensor([len(group.rollouts) for group in groups])
    return Batch(
        context=tuple(rollout.context for rollout in rollouts),
        actions_BT=_pad([rollout.actions for rollout in rollouts], lengths),
        mask_BT=torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
        behavior_logprobs_BT=_pad([rollout.behavior_logprobs for rollout in rollouts], lengths).float(),
        reward_B=torch.tensor(rewards),
        rewards_BT=_pad(earned, lengths).float(),
        valid_B=torch.tensor([rollout.reward is not None for rollout in rollouts]),
        truncated_B=torch.tensor([not rollout.end.is_final for rollout in rollouts]),
        group_B=torch.arange(len(groups)).repeat_interleave(group_sizes),
        step_end_BT=_step_ends(rollouts, lengths),
    )


def _step_ends(rollouts: list[Rollout], lengths: list[int]) -> Tensor:
    """step_end_BT: the decisions that end a reasoning step; of a rollout without steps the last one."""
    end_BT = torch.zeros(len(rollouts), max(lengths), dtype=torch.bool)
    for row, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        ends = [length - 1] if rollout.step_ends is None else list(rollout.step_ends)
        if any(not 0 <= end < length for end in ends):
            raise ValueError(f"a rollout of {length} decisions has steps that end at {ends}")
        end_BT[row, ends] = True
    return end_BT


def _pad(rows: list[Any], lengths: list[int]) -> Tensor:
    """Rows of unequal length as one tensor [B, T, ...], with zeros after their ends."""
    joined = torch.from_numpy(np.concatenate([np.asarray(row) for row in rows]))
    padded = joined.new_zeros(len(rows), max(lengths), *joined.shape[1:])
    padded[torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]] = joined
    return padded
