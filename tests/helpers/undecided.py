"""Rollouts whose decisions stand between actions that the policy did not decide, as around a tool's output."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from covey.data import Group, Rollout
from helpers.tabular_policy import ACTIONS, generator

UNREAD = math.nan  # the log-probability of an undecided action


def with_gap(rollout: Rollout, gaps: Sequence[Sequence[int]]) -> Rollout:
    """The same decisions with `gaps[t]` undecided actions before decision t, and `gaps[-1]` after the last one."""
    actions: list[int] = []
    decided: list[bool] = []
    logprobs: list[float] = []
    places = []
    for t, gap in enumerate(gaps):
        actions += gap
        decided += [False] * len(gap)
        logprobs += [UNREAD] * len(gap)
        if t < len(rollout.actions):
            places.append(len(actions))
            actions.append(rollout.actions[t])
            decided.append(True)
            logprobs.append(rollout.behavior_logprobs[t])
    step_rewards = None
    if rollout.step_rewards is not None:
        step_rewards = [0.0] * len(actions)
        for place, reward in zip(places, rollout.step_rewards, strict=True):
            step_rewards[place] = reward
    step_ends = None if rollout.step_ends is None else [places[end] for end in rollout.step_ends]
    return replace(
        rollout,
        actions=actions,
        behavior_logprobs=logprobs,
        decided=decided,
        step_rewards=step_rewards,
        step_ends=step_ends,
    )


def with_gaps(groups: list[Group], seed: int = 0, longest: int = 3) -> list[Group]:
    """Groups with random gaps between and after the decisions, in two rollouts of three.

    The policy of `helpers.tabular_policy` looks at the action before a decision: a gap ends with the decision before
    it, so that every decision is made in the same state as without the gaps.
    """
    source = generator(1000 + seed)

    def numbers(count: int, upper: int) -> list[int]:
        return torch.randint(0, upper, (count,), generator=source).tolist()

    made = []
    for group in groups:
        rollouts = []
        for place, item in enumerate(group.rollouts):
            if place % 3 == 2:
                rollouts.append(item)
                continue
            gaps = [numbers(length, ACTIONS) for length in numbers(len(item.actions) + 1, longest + 1)]
            gaps[0] = []
            for before, gap in zip(item.actions, gaps[1:-1], strict=False):
                gap[-1:] = [before] if gap else []
            rollouts.append(with_gap(item, gaps))
        made.append(replace(group, rollouts=rollouts))
    return made
