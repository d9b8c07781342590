"""Prepares a batch for the update: values, advantages, loss weights, old and reference log-probabilities.

Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.config import ConfigError
from covey.core.kl import k3
from covey.core.loss_weights import count
from covey.data import Batch, Critic, Policy, PolicyOutput
from covey.train.metrics import value_metrics

# Where the KL is only watched, the reference reads every eighth group: enough for a curve, an eighth of the price.
LOG_KL_EVERY = 8


def prepare_batch(
    batch: Batch,
    policy: Policy,
    reference: Policy | None,
    algorithm: Algorithm,
    *,
    critic: Critic | None = None,
    kl_coefficient: float,
    optimizer_steps: int,
    mask_truncated: bool,
) -> tuple[Batch, dict[str, float]]:
    """Everything that the update needs to know of a batch, computed once, before the first backward.

    Args:
        batch: as collated; every row of the step.
        policy: evaluates the old log-probabilities, if more than one optimizer step follows.
        reference: the policy that the KL is measured to; None if there is none.
        critic: what the algorithm's value loss trains; None if it has none.
        kl_coefficient: of this step.
        optimizer_steps: how many will be made from this batch.
        mask_truncated: leave rollouts that a limit cut out of the loss; their rewards stay in the baseline.

    Returns:
        the rows that teach, and metrics of the whole step. A row teaches if it has an advantage other than 0; where a
        KL or an entropy is part of the loss, also if a sibling has one, for they pull on every rollout of a live group;
        where a critic learns, always.

    Raises:
        ConfigError: if something is missing that the algorithm needs: a reference policy or a critic.
    """
    _check_components(algorithm, reference, critic, kl_coefficient)
    rows = len(batch)
    to_reference = bool(kl_coefficient) and not algorithm.kl.to_behavior
    kl_in_loss = bool(kl_coefficient) and not algorithm.kl.in_reward
    kl_left_to_policy = to_reference and algorithm.kl.by_policy
    reference_BT = torch.full_like(batch.behavior_logprobs_BT, math.nan)
    all_logprobs_BTV = None
    if reference is not None and to_reference and not kl_in_loss:
        reference_BT, _ = evaluated(reference, batch, batch.valid_B)
        batch = _subtract_kl(batch, algorithm, reference_BT, kl_coefficient)
    if critic is not None:
        batch = _with_values(batch, policy, critic)

    advantages_BT, returns_BT = algorithm.advantage(batch)
    counted_BT = batch.mask_BT & batch.valid_B[:, None]
    if mask_truncated:
        counted_BT = counted_BT & ~batch.truncated_B[:, None]
    alive = has_signal(batch, advantages_BT)
    pulled = kl_in_loss or bool(algorithm.entropy_coefficient)
    teaching_B = alive[batch.group_B] if pulled else (advantages_BT != 0).any(dim=1)
    teaches_B = counted_BT.any(dim=1) & (teaching_B | (critic is not None))
    metrics = {"groups/zero_advantage_fraction": 1.0 - float(alive.float().mean())}

    if reference is not None and not kl_left_to_policy and (kl_in_loss or not to_reference):
        watched_B = batch.valid_B & (batch.group_B % LOG_KL_EVERY == 0)
        reference_BT, all_logprobs_BTV = evaluated(reference, batch, teaches_B if to_reference else watched_B)
    known_BT = batch.mask_BT & ~reference_BT.isnan()
    if known_BT.any():
        # k3 of the sampled decisions, whatever estimator the algorithm uses: never negative and of low variance.
        metrics["kl"] = float(k3(batch.behavior_logprobs_BT, reference_BT)[known_BT].mean())
    metrics |= value_metrics(batch.values_BT, returns_BT, counted_BT)

    old_BT, old_BTV = evaluated(policy, batch, teaches_B) if optimizer_steps > 1 else (None, None)
    batch = replace(
        batch,
        mask_BT=counted_BT,
        advantages_BT=torch.where(counted_BT, advantages_BT, 0.0),
        returns_BT=returns_BT,
        loss_weights_BT=algorithm.aggregation(counted_BT, count(counted_BT)).to(torch.float32),
        reference_logprobs_BT=reference_BT,
        reference_all_logprobs_BTV=all_logprobs_BTV,
        proximal_logprobs_BT=old_BT,
        proximal_all_logprobs_BTV=old_BTV,
    )
    metrics["decisions/trained"] = float(counted_BT[teaches_B].sum())
    metrics["update/rows"] = float(teaches_B.sum()) / rows
    return batch if teaches_B.all() else batch.select(teaches_B.nonzero()[:, 0]), metrics


@torch.no_grad()
def evaluated(policy: Policy, batch: Batch, wanted_B: Tensor) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities that `policy` gives the decisions of the wanted rows, in nats, NaN on other rows, and
    those of every action where the policy tells them, 0 on other rows.
    """
    logprobs_BT = torch.full_like(batch.behavior_logprobs_BT, math.nan)
    all_logprobs_BTV = None

    def keep(rows: Tensor, part: Batch) -> None:
        nonlocal all_logprobs_BTV
        evaluation: PolicyOutput = policy.evaluate(part)
        width = part.mask_BT.shape[1]
        logprobs_BT[rows, :width] = evaluation.logprobs_BT.to(logprobs_BT)
        if evaluation.all_logprobs_BTV is not None:
            if all_logprobs_BTV is None:
                actions = evaluation.all_logprobs_BTV.shape[-1]
                all_logprobs_BTV = logprobs_BT.new_zeros(*logprobs_BT.shape, actions)
            all_logprobs_BTV[rows, :width] = evaluation.all_logprobs_BTV.to(logprobs_BT)

    _by_microbatch(policy, batch, wanted_B, keep)
    return logprobs_BT, all_logprobs_BTV


def _by_microbatch(policy: Policy, batch: Batch, wanted_B: Tensor, visit: Callable[[Tensor, Batch], None]) -> None:
    """Visit the wanted rows in pieces that the policy can evaluate at once: (their row indices, the piece)."""
    wanted = wanted_B.nonzero()[:, 0]
    if not len(wanted):
        return
    chosen = batch if len(wanted) == len(batch) else batch.select(wanted)
    for rows in policy.microbatches(chosen):
        visit(wanted[rows], chosen.select(rows))


@torch.no_grad()
def _with_values(batch: Batch, policy: Policy, critic: Critic) -> Batch:
    """The batch with the critic's opinion of every state, and of the state that each row ended in.

    Where the episode was over nothing follows and the value is 0; a time limit or the end of a fragment is no end.
    """
    values_BT = torch.zeros_like(batch.behavior_logprobs_BT)
    bootstrap_value_B = torch.zeros_like(batch.reward_B)

    def keep(rows: Tensor, part: Batch) -> None:
        values_BT[rows, : part.mask_BT.shape[1]] = critic.values(part).to(values_BT)
        bootstrap_value_B[rows] = critic.bootstrap_values(part).to(bootstrap_value_B)

    _by_microbatch(policy, batch, batch.valid_B, keep)
    return replace(batch, values_BT=values_BT, bootstrap_value_B=torch.where(batch.truncated_B, bootstrap_value_B, 0.0))


def _subtract_kl(batch: Batch, algorithm: Algorithm, reference_BT: Tensor, coefficient: float) -> Batch:
    """The batch with the KL taken off its rewards: DeepSeekMath (arXiv 2402.03300), eq. 2."""
    penalty_BT = coefficient * algorithm.kl.estimator(batch.behavior_logprobs_BT, reference_BT)
    penalty_BT = torch.where(batch.mask_BT & batch.valid_B[:, None], penalty_BT, 0.0)
    return replace(batch, reward_B=batch.reward_B - penalty_BT.sum(dim=1), rewards_BT=batch.rewards_BT - penalty_BT)


def has_signal(batch: Batch, advantages_BT: Tensor) -> Tensor:
    """For every group: did some rollout do better than another?"""
    alive = torch.zeros(int(batch.group_B.max()) + 1, dtype=torch.bool)
    alive[batch.group_B[(advantages_BT != 0).any(dim=1)]] = True
    return alive


def _check_components(
    algorithm: Algorithm, reference: Policy | None, critic: Critic | None, kl_coefficient: float
) -> None:
    if kl_coefficient and not algorithm.kl.to_behavior and reference is None:
        raise ConfigError(
            f"the KL coefficient is {kl_coefficient} but there is no reference policy: give one or set it to 0"
        )
    if (algorithm.value_loss is None) != (critic is None):
        has, lacks = (
            ("needs a critic", "give it one") if critic is None else ("has no use for a critic", "leave it out")
        )
        raise ConfigError(f"the algorithm {algorithm.name} {has}: {lacks}")
