"""From groups of rollouts to one padded batch."""

from __future__ import annotations

import torch

from covey.data.types import Batch, Group


def collate(groups: list[Group]) -> Batch:
    """Stack every rollout of `groups` into a Batch of [B, T] decisions, padded on the right.

    Padding is marked by `mask_BT` alone: no token id has a special meaning here.

    Raises:
        ValueError: if there is no rollout, or a rollout without a decision.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise ValueError("collate needs at least one rollout")
    lengths = [len(rollout.actions) for rollout in rollouts]
    if min(lengths) == 0:
        raise ValueError("every rollout needs at least one decision")
    shape = (len(rollouts), max(lengths))
    actions_BT = torch.zeros(shape, dtype=torch.int64)
    behavior_logprobs_BT = torch.zeros(shape, dtype=torch.float32)
    for row, rollout in enumerate(rollouts):
        actions_BT[row, : lengths[row]] = torch.tensor(rollout.actions, dtype=torch.int64)
        behavior_logprobs_BT[row, : lengths[row]] = torch.tensor(rollout.behavior_logprobs)
    rewards = [rollout.reward for rollout in rollouts]
    group_sizes = torch.tensor([len(group.rollouts) for group in groups])
    return Batch(
        context=tuple(rollout.context for rollout in rollouts),
        actions_BT=actions_BT,
        mask_BT=torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        behavior_logprobs_BT=behavior_logprobs_BT,
        reward_B=torch.tensor([0.0 if reward is None else reward for reward in rewards]),
        valid_B=torch.tensor([reward is not None for reward in rewards]),
        truncated_B=torch.tensor([not rollout.end.is_final for rollout in rollouts]),
        group_B=torch.arange(len(groups)).repeat_interleave(group_sizes),
    )
