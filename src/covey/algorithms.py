"""An algorithm is a composition: advantage x ratio x surrogate x KL x aggregation x value loss.

To add one, write a function like those below that names its source. Shapes: B rollouts, T decisions, V actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from covey.config import ConfigError
from covey.core import advantages, aggregation, kl, ratios, schedules, surrogates, values
from covey.data import Batch, Evaluation

# value_N, group_N, valid_N -> advantage_N: compares numbers with the others of their group
Comparison = Callable[[Tensor, Tensor, Tensor], Tensor]
LogRatio = Callable[[Tensor, Tensor, Tensor], Tensor]  # logprobs_BT, old_logprobs_BT, mask_BT -> log_ratio_BT
SurrogateLoss = Callable[[Tensor, Tensor, Tensor], surrogates.Surrogate]
KLEstimator = Callable[[Tensor, Tensor], Tensor]  # logprobs_BT, reference_logprobs_BT -> kl_BT; or both BTV
CriticError = Callable[[Tensor, Tensor, Tensor], Tensor]  # values_BT, returns_BT, old_values_BT -> error_BT

_NEVER = schedules.constant(0.0)


class Advantages(NamedTuple):
    """How much better than expected every decision was, and what a critic should have said; 0 where undecided."""

    advantages_BT: Tensor
    returns_BT: Tensor | None = None


AdvantageEstimator = Callable[[Batch], Advantages]
Credit = Callable[[Comparison], AdvantageEstimator]  # what is compared with what


def outcome(compare: Comparison) -> AdvantageEstimator:
    """Rollouts are compared by their rewards; all decisions of a rollout share its advantage. DeepSeekMath 4.1.2."""

    def estimate(batch: Batch) -> Advantages:
        advantage_B = compare(batch.reward_B, batch.group_B, batch.valid_B)
        return Advantages(torch.where(batch.mask_BT, advantage_B[:, None], 0.0))

    return estimate


def reward_to_go(compare: Comparison, *, gamma: float = 1.0, same_step: bool = True) -> AdvantageEstimator:
    """Decisions are compared by what was earned from them on: with the siblings' decisions at the same step (those
    rollouts that were still going), or with all decisions of the group. REINFORCE's returns (Williams 1992) in GRPO's
    groups.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = values.discounted_sums(batch.rewards_BT, batch.mask_BT, gamma)
        width = batch.mask_BT.shape[1]
        group_BT = batch.group_B[:, None].expand_as(batch.mask_BT)
        if same_step:
            group_BT = group_BT * width + torch.arange(width, device=group_BT.device)
        return Advantages(_compare_decisions(compare, returns_BT, group_BT, batch))

    return estimate


def within_rollout(compare: Comparison, *, gamma: float = 0.99) -> AdvantageEstimator:
    """Decisions are compared by their discounted returns with the other decisions of the same rollout.

    No sibling is needed. The form in which articles explain GRPO on CartPole; REINFORCE with whitened returns.
    """

    def estimate(batch: Batch) -> Advantages:
        returns_BT = values.discounted_sums(batch.rewards_BT, batch.mask_BT, gamma)
        row_BT = torch.arange(len(batch), device=returns_BT.device)[:, None].expand_as(batch.mask_BT)
        return Advantages(_compare_decisions(compare, returns_BT, row_BT, batch))

    return estimate


def critic(*, gamma: float = 0.99, lam: float = 0.95, whiten: bool = True) -> AdvantageEstimator:
    """Decisions are compared with what the critic expected: GAE (arXiv 1506.02438), whitened over the batch."""

    def estimate(batch: Batch) -> Advantages:
        assert batch.values_BT is not None
        assert batch.next_value_B is not None
        advantages_BT, returns_BT = values.gae(
            batch.rewards_BT, batch.values_BT, batch.next_value_B, batch.mask_BT, gamma=gamma, lam=lam
        )
        if whiten:
            whole_BT = torch.zeros_like(batch.mask_BT, dtype=torch.int64)
            advantages_BT = _compare_decisions(advantages.group_zscore, advantages_BT, whole_BT, batch)
        return Advantages(advantages_BT, returns_BT)

    return estimate


def returns_over_batch(compare: Comparison, *, gamma: float = 1.0) -> AdvantageEstimator:
    """Decisions are compared by what was earned from them on with every decision of the step, whatever its group."""

    def estimate(batch: Batch) -> Advantages:
        returns_BT = values.discounted_sums(batch.rewards_BT, batch.mask_BT, gamma)
        whole_BT = torch.zeros_like(batch.mask_BT, dtype=torch.int64)
        return Advantages(_compare_decisions(compare, returns_BT, whole_BT, batch))

    return estimate


def _compare_decisions(compare: Comparison, value_BT: Tensor, group_BT: Tensor, batch: Batch) -> Tensor:
    """advantages_BT of single decisions, each compared within its own group."""
    counted_BT = batch.mask_BT & batch.valid_B[:, None]
    advantages_BT = torch.zeros_like(value_BT)
    if counted_BT.any():
        value_N = value_BT[counted_BT]
        advantages_BT[counted_BT] = compare(value_N, group_BT[counted_BT], torch.ones_like(value_N, dtype=torch.bool))
    return advantages_BT


@dataclass(frozen=True)
class KLPenalty:
    """The pull toward another policy: which, how it is estimated, how strong it is, and where it enters."""

    coefficient: schedules.Schedule = _NEVER
    estimator: KLEstimator = kl.k3  # kl.exact for policies that tell the probability of every action
    in_reward: bool = False  # subtracted from the reward, without gradient; else added to the loss
    to_behavior: bool = False  # KL(pi_old || pi), to the policy that sampled; else KL(pi || pi_ref)

    def __post_init__(self) -> None:
        """Refuse what would not pull.

        Raises:
            ConfigError: for a penalty in the reward that is exact, or to the policy that sampled.
        """
        if self.in_reward and self.estimator is kl.exact:
            raise ConfigError(
                "KLPenalty(kl.exact, in_reward=True): the exact KL does not depend on the decision that was sampled, "
                "so in its reward it pulls nowhere; use kl.k1, or leave out in_reward"
            )
        if self.in_reward and self.to_behavior:
            raise ConfigError(
                "KLPenalty(in_reward=True, to_behavior=True): when rewards are paid, the policy is still the one that "
                "sampled, and their KL is 0; leave out in_reward"
            )


@dataclass(frozen=True)
class ValueLoss:
    """What moves the critic."""

    coefficient: float = 0.5
    error: CriticError = values.squared_error


@dataclass(frozen=True)
class LossTerms:
    """The loss of some rows, ready for backward, and what it was made of."""

    loss: Tensor
    log_ratio_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient algorithm along six independent axes."""

    name: str
    advantage: AdvantageEstimator
    ratio: LogRatio
    surrogate: SurrogateLoss
    aggregation: aggregation.Aggregation
    kl: KLPenalty
    value_loss: ValueLoss | None = None  # None: there is no critic
    entropy_coefficient: float = 0.0  # of a bonus for undecidedness

    def loss(self, evaluation: Evaluation, batch: Batch, kl_coefficient: float) -> LossTerms:
        """(weights_BT * (surrogate_BT + kl_coefficient * kl_BT - entropy_coefficient * entropy_BT)).sum().

        The ratio's denominator is the old policy as the trainer evaluates it; where one optimizer step follows each
        sampling, that is the current policy itself, so that the ratio is 1 and only its gradient matters.
        """
        assert batch.advantages_BT is not None
        assert batch.weights_BT is not None
        logprobs_BT = torch.where(batch.mask_BT, evaluation.logprobs_BT, 0.0)
        old_BT = logprobs_BT.detach() if batch.proximal_logprobs_BT is None else batch.proximal_logprobs_BT
        log_ratio_BT = self.ratio(logprobs_BT, old_BT, batch.mask_BT)
        loss_BT, low_BT, high_BT = self.surrogate(logprobs_BT, log_ratio_BT, batch.advantages_BT)
        if kl_coefficient and not self.kl.in_reward:
            loss_BT = loss_BT + kl_coefficient * self._kl(evaluation, batch)
        if self.entropy_coefficient:
            loss_BT = loss_BT - self.entropy_coefficient * torch.where(batch.mask_BT, evaluation.entropy_BT, 0.0)
        loss = (batch.weights_BT * loss_BT).sum()
        return LossTerms(loss, log_ratio_BT.detach(), low_BT & batch.mask_BT, high_BT & batch.mask_BT)

    def critic_loss(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """(weights_BT * coefficient * error_BT).sum() over the rows of `batch`; PPO (arXiv 1707.06347), eq. 9."""
        assert self.value_loss is not None
        assert batch.returns_BT is not None
        assert batch.values_BT is not None
        assert batch.weights_BT is not None
        error_BT = self.value_loss.error(values_BT, batch.returns_BT, batch.values_BT)
        return self.value_loss.coefficient * (batch.weights_BT * torch.where(batch.mask_BT, error_BT, 0.0)).sum()

    def _kl(self, evaluation: Evaluation, batch: Batch) -> Tensor:
        """kl_BT of the penalty, 0 where undecided."""
        mask, current = batch.mask_BT, evaluation.logprobs_BT
        other = batch.proximal_logprobs_BT if self.kl.to_behavior else batch.reference_logprobs_BT
        if self.kl.estimator is kl.exact:
            assert evaluation.distribution_BTV is not None
            mask, current = mask[..., None], evaluation.distribution_BTV
            other = batch.proximal_distribution_BTV if self.kl.to_behavior else batch.reference_distribution_BTV
        if other is None and self.kl.to_behavior:
            return torch.zeros_like(evaluation.logprobs_BT)  # the first step after sampling: the policies are one
        assert other is not None
        current, other = torch.where(mask, current, 0.0), torch.where(mask, other, 0.0)
        # Sampled by the behaviour policy, so KL(pi_old || pi) is the one that its estimators are unbiased for.
        return self.kl.estimator(other, current) if self.kl.to_behavior else self.kl.estimator(current, other)


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(schedules.constant(0.04)),  # noqa: B008
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """GRPO: DeepSeekMath (arXiv 2402.03300), eq. 3, with the coefficient 0.04 of its section 4.2."""
    return Algorithm(
        name="grpo",
        advantage=credit(advantages.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def dr_grpo(
    *,
    max_length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """Dr.GRPO (arXiv 2503.20783), section 3.2: no division by the group's std nor by a rollout's length, no KL."""
    return Algorithm(
        name="dr_grpo",
        advantage=credit(advantages.group_mean_only),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.constant_length(max_length),
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """DAPO (arXiv 2503.14476), eq. 8: more room above than below, every token counts the same, no KL.

    Its dynamic sampling and overlong shaping belong to the sampling of a run, which draws and pays for rollouts.
    """
    return Algorithm(
        name="dapo",
        advantage=credit(advantages.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.token_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """GSPO (arXiv 2507.18071), eq. 5 and 7, clipped as in its section 5.1: one ratio per rollout."""
    return Algorithm(
        name="gspo",
        advantage=credit(advantages.group_zscore),
        ratio=ratios.sequence_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def cispo(
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    kl: KLPenalty = KLPenalty(),
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """CISPO (MiniMax-M1, arXiv 2506.13585), eq. 4: the weight is clipped, not the gradient; no lower bound, no KL.

    The paper tunes the upper bound and does not print it; a weight of at most 5 is what TRL's documentation takes.
    """
    return Algorithm(
        name="cispo",
        advantage=credit(advantages.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.capped_score, cap=1 + clip_high, least=1 - clip_low),
        aggregation=aggregation.token_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def reinforce_pp(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KLPenalty = KLPenalty(schedules.constant(0.01), kl.k1, in_reward=True),  # noqa: B008
    entropy_coefficient: float = 0.0,
) -> Algorithm:
    """REINFORCE++ (arXiv 2501.03262), section 3: no groups; returns with the KL in them, whitened over the step."""
    return Algorithm(
        name="reinforce_pp",
        advantage=returns_over_batch(advantages.group_zscore),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.token_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def rloo(
    *,
    kl: KLPenalty = KLPenalty(schedules.constant(0.05), kl.k1, in_reward=True),  # noqa: B008
    entropy_coefficient: float = 0.0,
    credit: Credit = outcome,
) -> Algorithm:
    """RLOO (arXiv 2402.14740), section 2: leave-one-out baseline, no clipping, k1 in the reward."""
    return Algorithm(
        name="rloo",
        advantage=credit(advantages.leave_one_out),
        ratio=ratios.token_log_ratio,
        surrogate=surrogates.score_function,
        aggregation=aggregation.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def reinforce(*, kl: KLPenalty = KLPenalty(), entropy_coefficient: float = 0.0, credit: Credit = outcome) -> Algorithm:
    """REINFORCE (Williams 1992) with the group's mean as its baseline."""
    return Algorithm(
        name="reinforce",
        advantage=credit(advantages.group_mean_only),
        ratio=ratios.token_log_ratio,
        surrogate=surrogates.score_function,
        aggregation=aggregation.sequence_mean,
        kl=kl,
        entropy_coefficient=entropy_coefficient,
    )


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    whiten: bool = True,
    value_coefficient: float = 0.5,
    value_clip: float | None = None,
    kl: KLPenalty = KLPenalty(estimator=kl.k1, in_reward=True),
    entropy_coefficient: float = 0.0,
) -> Algorithm:
    """PPO (arXiv 1707.06347), eq. 9, with GAE and a critic of its own; a KL, where there is one, is k1 in the reward
    (DeepSeekMath, arXiv 2402.03300, eq. 2).
    """
    error = partial(values.clipped_squared_error, clip=value_clip) if value_clip else values.squared_error
    return Algorithm(
        name="ppo",
        advantage=critic(gamma=gamma, lam=lam, whiten=whiten),
        ratio=ratios.token_log_ratio,
        surrogate=partial(surrogates.clipped_ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        aggregation=aggregation.token_mean,
        kl=kl,
        value_loss=ValueLoss(value_coefficient, error),
        entropy_coefficient=entropy_coefficient,
    )


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    build.__name__: build for build in (grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce_pp, ppo)
}
