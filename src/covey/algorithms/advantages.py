"""Advantage estimators: which numbers are compared with which.

A credit takes a comparison (`core/baselines.py`) and makes an advantage estimator of a batch; an algorithm picks both.
Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from covey.core import baselines, returns
from covey.data import Batch

# value_N, group_N, valid_N -> advantage_N: compares numbers with the others of their group
Baseline = Callable[[Tensor, Tensor, Tensor], Tensor]


class Advantages(NamedTuple):
    """Advantages of every decision, and the critic's targets; 0 where the mask is False."""

    advantages_BT: Tensor
    returns_BT: Tensor | None = None


AdvantageEstimator = Callable[[Batch], Advantages]
CreditAssignment = Callable[[Baseline], AdvantageEstimator]  # what is compared with what


def outcome(compare: Baseline) -> AdvantageEstimator:
    """Rollouts are compared by their rewards; all decisions of a rollout share its advantage. DeepSeekMath 4.1.2."""

    def estimate(batch: Batch) -> Advantages:
        advantage_B = compare(batch.reward_B, batch.group_B, batch.valid_B)
        return Advantages(torch.where(batch.mask_BT, advantage_B[:, None], 0.0))

    return estimate


def reward_to_go(compare: Baseline, *, gamma: float = 1.0) -> AdvantageEstimator:
    """Decisions are compared by their discounted returns with all decisions of the group.

    A_{i,t} compares s_{i,t} = sum_{l >= 0} gamma^l r_{i,t+l}: REINFORCE's returns (Williams 1992) in GRPO's groups.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = returns.discounted_returns(batch.rewards_BT, batch.mask_BT, gamma)
        group_BT = batch.group_B[:, None].expand_as(batch.mask_BT)
        return Advantages(_compare_decisions(compare, returns_BT, group_BT, batch))

    return estimate


def reward_to_go_by_step(compare: Baseline, *, gamma: float = 1.0) -> AdvantageEstimator:
    """Decisions are compared by their discounted returns with the siblings' decisions at the same step.

    As `reward_to_go`, with the rollouts of the group that had not ended before the step.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = returns.discounted_returns(batch.rewards_BT, batch.mask_BT, gamma)
        width = batch.mask_BT.shape[1]
        # Steps are counted in decisions: the columns of siblings differ if undecided actions lie between them.
        step_BT = batch.mask_BT.cumsum(dim=1) - batch.mask_BT.long()
        group_BT = batch.group_B[:, None] * width + step_BT
        return Advantages(_compare_decisions(compare, returns_BT, group_BT, batch))

    return estimate


def within_episode(compare: Baseline, *, gamma: float = 0.99) -> AdvantageEstimator:
    """Decisions are compared by their discounted returns with the other decisions of the same rollout.

    No sibling is needed. The form in which articles explain GRPO on CartPole; REINFORCE with whitened returns.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = returns.discounted_returns(batch.rewards_BT, batch.mask_BT, gamma)
        row_BT = torch.arange(len(batch), device=returns_BT.device)[:, None].expand_as(batch.mask_BT)
        return Advantages(_compare_decisions(compare, returns_BT, row_BT, batch))

    return estimate


def process(compare: Baseline) -> AdvantageEstimator:
    """Every step's reward is compared with all step rewards of the group; a decision has the advantages of its own step
    and of those after it.

    A_{i,t} = sum_{index(j) >= t} (r_i^{index(j)} - mean(R)) / std(R)      DeepSeekMath (arXiv 2402.03300), 4.1.3
    """

    def estimate(batch: Batch) -> Advantages:
        steps = _steps(batch)
        group_BK = batch.group_B[:, None].expand_as(steps.counted_BK)
        advantages_BK = _compared(compare, steps.reward_BK, group_BK, steps.counted_BK)
        at_end_BT = torch.where(steps.end_BT, advantages_BK.gather(1, steps.number_BT), 0.0)
        return Advantages(returns.discounted_returns(at_end_BT, batch.mask_BT, 1.0))

    return estimate


def process_by_step(compare: Baseline) -> AdvantageEstimator:
    """Every step's reward is compared with the siblings' rewards for the same step, the first with the first ones; the
    decisions of a step share its advantage, which later steps do not change.
    """

    def estimate(batch: Batch) -> Advantages:
        steps = _steps(batch)
        return _by_step_number(compare, steps.reward_BK, steps, batch)

    return estimate


def process_return_to_go(compare: Baseline) -> AdvantageEstimator:
    """The sum of a rollout's rewards from a step on is compared with the siblings' sums from their step of the same
    number on; the decisions of a step share the result.

    A_{i,k} compares s_{i,k} = sum_{j >= k} r_i^{index(j)}: returns (Williams 1992), a step at a time. A rollout that
    stopped misses the rewards of the steps that it did not take, so stopping never looks good by itself.
    """

    def estimate(batch: Batch) -> Advantages:
        steps = _steps(batch)
        earned_BK = torch.where(steps.counted_BK, steps.reward_BK, 0.0)
        return _by_step_number(compare, earned_BK.flip(1).cumsum(dim=1).flip(1), steps, batch)

    return estimate


def _by_step_number(compare: Baseline, value_BK: Tensor, steps: _Steps, batch: Batch) -> Advantages:
    """Steps compared with the siblings' of the same number; the decisions of a step share its advantage."""
    width = value_BK.shape[1]
    group_BK = batch.group_B[:, None] * width + torch.arange(width, device=batch.group_B.device)
    advantages_BK = _compared(compare, value_BK, group_BK, steps.counted_BK)
    return Advantages(torch.where(batch.mask_BT, advantages_BK.gather(1, steps.number_BT), 0.0))


class _Steps(NamedTuple):
    """The reasoning steps of a batch: K is a step's number in its rollout, from 0, at most one for each decision."""

    reward_BK: Tensor  # all that the decisions of a step earned: the step's reward, and a KL where it is in the reward
    counted_BK: Tensor  # bool, True where there is such a step and its rollout was graded
    number_BT: Tensor  # the step that a decision belongs to; after the last step one that does not exist
    end_BT: Tensor


def _steps(batch: Batch) -> _Steps:
    end_BT = batch.step_end_BT & batch.mask_BT
    number_BT = end_BT.cumsum(dim=1) - end_BT.long()  # of the steps that ended before this decision
    earned_BT = torch.where(batch.mask_BT, batch.rewards_BT, 0.0)
    reward_BK = torch.zeros_like(earned_BT).scatter_add(1, number_BT, earned_BT)
    exists_BK = torch.arange(end_BT.shape[1], device=end_BT.device) < end_BT.sum(dim=1, keepdim=True)
    return _Steps(reward_BK, exists_BK & batch.valid_B[:, None], number_BT, end_BT)


def gae_advantage(*, gamma: float = 0.99, lam: float = 0.95, whiten: bool = True) -> AdvantageEstimator:
    """Decisions are compared with what the critic expected: GAE (arXiv 1506.02438), whitened over the batch."""

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
    """Decisions are compared by what was earned from them on with every decision of the step, whatever its group."""

    def estimate(batch: Batch) -> Advantages:
        returns_BT = returns.discounted_returns(batch.rewards_BT, batch.mask_BT, gamma)
        return Advantages(_compare_over_step(compare, returns_BT, batch))

    return estimate


def _compare_over_step(compare: Baseline, value_BT: Tensor, batch: Batch) -> Tensor:
    """advantages_BT of single decisions, each compared with all of the step, whatever its group."""
    return _compare_decisions(compare, value_BT, torch.zeros_like(batch.mask_BT, dtype=torch.int64), batch)


def _compare_decisions(compare: Baseline, value_BT: Tensor, group_BT: Tensor, batch: Batch) -> Tensor:
    """advantages_BT of single decisions, each compared within its own group."""
    return _compared(compare, value_BT, group_BT, batch.mask_BT & batch.valid_B[:, None])


def _compared(compare: Baseline, value_BT: Tensor, group_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """The counted values compared, each within its own group; 0 elsewhere."""
    advantages_BT = torch.zeros_like(value_BT)
    if counted_BT.any():
        value_N = value_BT[counted_BT]
        advantages_BT[counted_BT] = compare(value_N, group_BT[counted_BT], torch.ones_like(value_N, dtype=torch.bool))
    return advantages_BT
