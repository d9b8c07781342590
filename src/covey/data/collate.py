"""Collation: groups of rollouts -> one padded batch."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.data.types import Batch, Group, Rollout


def collate(groups: list[Group]) -> Batch:
    """Stack every rollout of `groups` into a Batch of [B, T] columns, padded on the right.

    Padding and undecided actions are marked by `mask_BT` alone: no token id has a special meaning here. The reward of a
    rollout without step rewards is the reward of its last decision.

    Raises:
        ValueError: if there is no rollout; or for a rollout without a decision, with a decision mask whose length is
            not that of its actions, with a step that ends outside the rollout, or with a step end or a step reward at
            an undecided action.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise ValueError("collate needs at least one rollout")
    lengths = [len(rollout.actions) for rollout in rollouts]
    if min(lengths) == 0:
        raise ValueError("every rollout needs at least one decision")
    inside_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask_BT, last_decisions = _decisions(rollouts, inside_BT)
    rewards = [0.0 if rollout.reward is None else rollout.reward for rollout in rollouts]
    earned = [
        [0.0] * last + [reward] + [0.0] * (length - 1 - last) if rollout.step_rewards is None else rollout.step_rewards
        for rollout, length, last, reward in zip(rollouts, lengths, last_decisions, rewards, strict=True)
    ]
    rewards_BT = _pad(earned, inside_BT).float()
    step_end_BT = _step_ends(rollouts, lengths, last_decisions)
    if mask_BT is not inside_BT:
        _check_undecided(rewards_BT != 0, mask_BT, "a step reward at")
        _check_undecided(step_end_BT, mask_BT, "a reasoning step that ends at")
    names = tuple(dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts))
    group_sizes = torch.tensor([len(group.rollouts) for group in groups])
    behavior_logprobs_BT = _pad([rollout.behavior_logprobs for rollout in rollouts], inside_BT).float()
    contexts = tuple(rollout.context for rollout in rollouts)
    of_teacher = [rollout.teacher_context for rollout in rollouts]
    weights = [group.start.weight for group in groups for _ in group.rollouts]
    return Batch(
        context=contexts,
        actions_BT=_pad([rollout.actions for rollout in rollouts], inside_BT),
        mask_BT=mask_BT,
        behavior_logprobs_BT=torch.where(mask_BT, behavior_logprobs_BT, 0.0),
        reward_B=torch.tensor(rewards),
        rewards_BT=rewards_BT,
        valid_B=torch.tensor([rollout.reward is not None for rollout in rollouts]),
        truncated_B=torch.tensor([not rollout.end.is_final for rollout in rollouts]),
        group_B=torch.arange(len(groups)).repeat_interleave(group_sizes),
        step_end_BT=step_end_BT,
        teacher_context=None
        if all(context is None for context in of_teacher)
        else tuple(own if theirs is None else theirs for own, theirs in zip(contexts, of_teacher, strict=True)),
        group_weight_B=None if set(weights) == {1.0} else torch.tensor(weights),
        reward_names=names,
        reward_parts_BR=_reward_parts(rollouts, names) if names else None,
    )


def _reward_parts(rollouts: list[Rollout], names: tuple[str, ...]) -> Tensor:
    """reward_parts_BR: the values of the single rewards, NaN for those that have none."""
    values = [[rollout.reward_parts.get(name) for name in names] for rollout in rollouts]
    return torch.tensor([[math.nan if value is None else value for value in row] for row in values])


def _decisions(rollouts: list[Rollout], inside_BT: Tensor) -> tuple[Tensor, list[int]]:
    """mask_BT, True at decisions, and the column of each rollout's last decision. `inside_BT` is True at all actions.

    The mask is `inside_BT` itself if no rollout has a decision mask.
    """
    mask_BT = inside_BT
    last_decisions = [len(rollout.actions) - 1 for rollout in rollouts]
    for row, rollout in enumerate(rollouts):
        if rollout.decided is None:
            continue
        decided_T = np.asarray(rollout.decided, dtype=bool)
        if len(decided_T) != len(rollout.actions):
            raise ValueError(f"a rollout of {len(rollout.actions)} actions has a decision mask of {len(decided_T)}")
        if not decided_T.any():
            raise ValueError("every rollout needs at least one decision")
        if mask_BT is inside_BT:
            mask_BT = inside_BT.clone()
        mask_BT[row, : len(decided_T)] = torch.from_numpy(decided_T)
        last_decisions[row] = int(decided_T.nonzero()[0][-1])
    return mask_BT, last_decisions


def _step_ends(rollouts: list[Rollout], lengths: list[int], last_decisions: list[int]) -> Tensor:
    """step_end_BT: True at decisions that end a reasoning step; in a rollout without steps, at the last decision."""
    end_BT = torch.zeros(len(rollouts), max(lengths), dtype=torch.bool)
    for row, (rollout, length, last) in enumerate(zip(rollouts, lengths, last_decisions, strict=True)):
        ends = [last] if rollout.step_ends is None else list(rollout.step_ends)
        if any(not 0 <= end < length for end in ends):
            raise ValueError(f"a rollout of {length} actions has steps that end at {ends}")
        end_BT[row, ends] = True
    return end_BT


def _check_undecided(present_BT: Tensor, mask_BT: Tensor, what: str) -> None:
    """Check that an attribute of decisions is absent from undecided actions.

    Raises:
        ValueError: naming `what` and the first undecided action at which `present_BT` is True.
    """
    for row, column in (present_BT & ~mask_BT).nonzero().tolist():
        raise ValueError(f"rollout {row} has {what} action {column}, which the policy did not decide")


def _pad(rows: list[Any], inside_BT: Tensor) -> Tensor:
    """Rows of unequal length as one tensor [B, T, ...], with zeros after their ends."""
    joined = torch.from_numpy(np.concatenate([np.asarray(row) for row in rows]))
    padded = joined.new_zeros(*inside_BT.shape, *joined.shape[1:])
    padded[inside_BT] = joined
    return padded
