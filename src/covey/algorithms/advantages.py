"""Advantage estimators, and the credit assignments that build them.

A credit assignment takes a baseline (`core/baselines.py`) and returns an advantage estimator. An algorithm chooses
both. Shapes: B rollouts, T decisions, R rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from covey.core import baselines, returns
from covey.data import Batch

# value_N, group_N, valid_N -> advantage_N: compares each value with the values of its group
Baseline = Callable[[Tensor, Tensor, Tensor], Tensor]


class Advantages(NamedTuple):
    """Advantages of every decision, and the critic's targets; 0 where the mask is False."""

    advantages_BT: Tensor
    returns_BT: Tensor | None = None


AdvantageEstimator = Callable[[Batch], Advantages]
CreditAssignment = Callable[[Baseline], AdvantageEstimator]  # chooses the values and the groups of the baseline


def outcome(compare: Baseline) -> AdvantageEstimator:
    """Outcome supervision: the rollouts of a group are compared by their rewards. DeepSeekMath (arXiv 2402.03300),
    4.1.2.

    All decisions of a rollout have its advantage.
    """

    def estimate(batch: Batch) -> Advantages:
        advantage_B = compare(batch.reward_B, batch.group_B, batch.valid_B)
        return Advantages(torch.where(batch.mask_BT, advantage_B[:, None], 0.0))

    return estimate


def outcome_of_each_reward(weights: Mapping[str, float]) -> CreditAssignment:
    """Outcome supervision with decoupled normalization: the rollouts of a group are compared by each reward on its own.

    The weighted sum of the advantages by each reward is whitened over the batch: GDPO (arXiv 2601.05242). A reward that
    is the same in a whole group contributes 0 there, and one without a value for a rollout contributes 0 to it. All
    decisions of a rollout have its advantage.

    Args:
        weights: the weight of each reward, by its name in `Batch.reward_names`.
    """

    def credit(compare: Baseline) -> AdvantageEstimator:
        def estimate(batch: Batch) -> Advantages:
            assert batch.reward_parts_BR is not None
            known_BR = batch.valid_B[:, None] & ~batch.reward_parts_BR.isnan()
            columns = zip(batch.reward_parts_BR.T, known_BR.T, strict=True)
            advantage_BR = torch.stack([compare(part_B, batch.group_B, known_B) for part_B, known_B in columns], dim=1)
            weight_R = advantage_BR.new_tensor([weights[name] for name in batch.reward_names])
            whitened_B = baselines.weighted_whitened_sum(advantage_BR, weight_R, batch.valid_B)
            return Advantages(torch.where(batch.mask_BT, whitened_B[:, None], 0.0))

        return estimate

    return credit


def reward_to_go(compare: Baseline, *, gamma: float = 1.0) -> AdvantageEstimator:
    """Reward-to-go: decisions are compared by their discounted returns with all decisions of the group.

    A_{i,t} compares s_{i,t} = sum_{l >= 0} gamma^l r_{i,t+l}: REINFORCE's returns (Williams 1992) in GRPO's groups.

    Args:
        compare: the baseline.
        gamma: discount per decision.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = returns.discounted_returns(batch.rewards_BT, batch.mask_BT, gamma)
        group_BT = batch.group_B[:, None].expand_as(batch.mask_BT)
        return Advantages(_compare_decisions(compare, returns_BT, group_BT, batch))

    return estimate


def reward_to_go_by_step(compare: Baseline, *, gamma: float = 1.0) -> AdvantageEstimator:
    """Reward-to-go by time step: decisions are compared with the decisions of their group at the same time step.

    As `reward_to_go`, but only rollouts that have not ended before the time step are compared.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = returns.discounted_returns(batch.rewards_BT, batch.mask_BT, gamma)
        width = batch.mask_BT.shape[1]
        # Steps are counted in decisions, because undecided actions shift the columns of some rollouts.
        step_BT = batch.mask_BT.cumsum(dim=1) - batch.mask_BT.long()
        group_BT = batch.group_B[:, None] * width + step_BT
        return Advantages(_compare_decisions(compare, returns_BT, group_BT, batch))

    return estimate


def within_episode(compare: Baseline, *, gamma: float = 0.99) -> AdvantageEstimator:
    """REINFORCE with whitened returns: decisions are compared by their discounted returns within their own rollout.

    A group of one rollout suffices. Articles explain GRPO on CartPole in this form.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = returns.discounted_returns(batch.rewards_BT, batch.mask_BT, gamma)
        row_BT = torch.arange(len(batch), device=returns_BT.device)[:, None].expand_as(batch.mask_BT)
        return Advantages(_compare_decisions(compare, returns_BT, row_BT, batch))

    return estimate


def process(compare: Baseline) -> AdvantageEstimator:
    """Process supervision: the reward of every reasoning step is compared with all step rewards of the group.

    A_{i,t} = sum_{index(j) >= t} (r_i^{index(j)} - mean(R)) / std(R)      DeepSeekMath (arXiv 2402.03300), 4.1.3

    The advantage of a decision is the sum over its own step and all later steps.
    """

    def estimate(batch: Batch) -> Advantages:
        steps = _steps(batch)
        group_BK = batch.group_B[:, None].expand_as(steps.counted_BK)
        advantages_BK = _compared(compare, steps.reward_BK, group_BK, steps.counted_BK)
        at_end_BT = torch.where(steps.end_BT, advantages_BK.gather(1, steps.number_BT), 0.0)
        return Advantages(returns.discounted_returns(at_end_BT, batch.mask_BT, 1.0))

    return estimate


def process_by_step(compare: Baseline) -> AdvantageEstimator:
    """Process supervision by step number: the reward of step k is compared with the group's rewards of step k.

    All decisions of a step have its advantage. Later steps do not change it.
    """

    def estimate(batch: Batch) -> Advantages:
        steps = _steps(batch)
        return _by_step_number(compare, steps.reward_BK, steps, batch)

    return estimate


def process_return_to_go(compare: Baseline) -> AdvantageEstimator:
    """Process supervision by return-to-go: the sum of the step rewards from step k on is compared within the group.

    A_{i,k} compares s_{i,k} = sum_{j >= k} r_i^{index(j)}: returns (Williams 1992), one per reasoning step.

    All decisions of a step have its advantage. A rollout that has ended has no rewards of further steps, so an early
    end is not an advantage by itself.
    """

    def estimate(batch: Batch) -> Advantages:
        steps = _steps(batch)
        earned_BK = torch.where(steps.counted_BK, steps.reward_BK, 0.0)
        return _by_step_number(compare, earned_BK.flip(1).cumsum(dim=1).flip(1), steps, batch)

    return estimate


def _by_step_number(compare: Baseline, value_BK: Tensor, steps: _Steps, batch: Batch) -> Advantages:
    """Advantages of reasoning steps, each compared with the group's steps of the same number."""
    width = value_BK.shape[1]
    group_BK = batch.group_B[:, None] * width + torch.arange(width, device=batch.group_B.device)
    advantages_BK = _compared(compare, value_BK, group_BK, steps.counted_BK)
    return Advantages(torch.where(batch.mask_BT, advantages_BK.gather(1, steps.number_BT), 0.0))


class _Steps(NamedTuple):
    """The reasoning steps of a batch. K is the index of a step in its rollout, from 0; there are at most T."""

    reward_BK: Tensor  # sum of the rewards of a step's decisions, which include a KL in the reward
    counted_BK: Tensor  # bool, True if the step exists and its rollout was graded
    number_BT: Tensor  # index of the decision's step; after the last step, the index of a step that does not exist
    end_BT: Tensor  # bool, True at the last decision of a step


def _steps(batch: Batch) -> _Steps:
    end_BT = batch.step_end_BT & batch.mask_BT
    number_BT = end_BT.cumsum(dim=1) - end_BT.long()  # number of steps that ended before this decision
    earned_BT = torch.where(batch.mask_BT, batch.rewards_BT, 0.0)
    reward_BK = torch.zeros_like(earned_BT).scatter_add(1, number_BT, earned_BT)
    exists_BK = torch.arange(end_BT.shape[1], device=end_BT.device) < end_BT.sum(dim=1, keepdim=True)
    return _Steps(reward_BK, exists_BK & batch.valid_B[:, None], number_BT, end_BT)


def gae_advantage(*, gamma: float = 0.99, lam: float = 0.95, whiten: bool = True) -> AdvantageEstimator:
    """Generalized advantage estimation: GAE (arXiv 1506.02438), eq. 16.

    Args:
        gamma: discount per decision.
        lam: 0 gives the one-step TD error, 1 the return minus the value.
        whiten: normalize the advantages over all decisions of the batch.
    """

    def estimate(batch: Batch) -> Advantages:
        assert batch.values_BT is not None
        assert batch.bootstrap_value_B is not None
        advantages_BT, returns_BT = returns.gae(
            batch.rewards_BT, batch.values_BT, batch.bootstrap_value_B, batch.mask_BT, gamma=gamma, lam=lam
        )
        if whiten:
            advantages_BT = _compare_over_step(baselines.group_zscore, advantages_BT, batch)
        return Advantages(advantages_BT, returns_BT)

    return estimate


def batch_normalized_returns(compare: Baseline, *, gamma: float = 1.0) -> AdvantageEstimator:
    """Batch-normalized returns: decisions are compared by their discounted returns with all decisions of the batch.

    REINFORCE++ (arXiv 2501.03262), section 3. Groups are ignored.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = returns.discounted_returns(batch.rewards_BT, batch.mask_BT, gamma)
        return Advantages(_compare_over_step(compare, returns_BT, batch))

    return estimate


def _compare_over_step(compare: Baseline, value_BT: Tensor, batch: Batch) -> Tensor:
    """advantages_BT of single decisions, each compared with all decisions of the batch."""
    return _compare_decisions(compare, value_BT, torch.zeros_like(batch.mask_BT, dtype=torch.int64), batch)


def _compare_decisions(compare: Baseline, value_BT: Tensor, group_BT: Tensor, batch: Batch) -> Tensor:
    """advantages_BT of single decisions, each compared within its own group."""
    return _compared(compare, value_BT, group_BT, batch.mask_BT & batch.valid_B[:, None])


def _compared(compare: Baseline, value_BT: Tensor, group_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """Advantages of the counted values, each within its own group; 0 elsewhere."""
    advantages_BT = torch.zeros_like(value_BT)
    if counted_BT.any():
        value_N = value_BT[counted_BT]
        advantages_BT[counted_BT] = compare(value_N, group_BT[counted_BT], torch.ones_like(value_N, dtype=torch.bool))
    return advantages_BT
