"""From a collated batch to one that is ready to learn from: advantages, weights, old and reference log-probabilities.

Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.config import ConfigError
from covey.core.aggregation import count
from covey.core.kl import k3
from covey.data import Batch, Policy

# Where the KL is only watched, the reference reads every fourth group: enough for a curve, a quarter of the price.
WATCH_EVERY = 4


def annotate(
    batch: Batch,
    policy: Policy,
    reference: Policy | None,
    algorithm: Algorithm,
    *,
    kl_coefficient: float,
    optimizer_steps: int,
    mask_truncated: bool,
) -> tuple[Batch, dict[str, float]]:
    """Everything that the update needs to know of a batch, computed once, before the first backward.

    Args:
        batch: as collated; every row of the step.
        policy: evaluates the old log-probabilities, where more than one optimizer step will follow.
        reference: the policy that the KL is measured to; None where there is none.
        kl_coefficient: of this step.
        optimizer_steps: how many will be made from this batch.
        mask_truncated: leave rollouts that a limit cut out of the loss; their rewards stay in the baseline.

    Returns:
        the rows that teach, and metrics of the whole step. A row teaches if it has an advantage other than 0; where a
        KL is added to the loss, also if a sibling has one, for the KL pulls on every rollout of a live group.

    Raises:
        ConfigError: if the KL has a coefficient but there is no reference to measure it to.
    """
    if kl_coefficient and reference is None:
        raise ConfigError(
            f"the KL coefficient is {kl_coefficient} but there is no reference policy: give one or set it to 0"
        )
    rows = len(batch)
    kl_in_loss = bool(kl_coefficient) and not algorithm.kl.in_reward
    reference_BT = torch.full_like(batch.behavior_logprobs_BT, math.nan)
    if reference is not None and kl_coefficient and not kl_in_loss:
        reference_BT = logprobs_of(reference, batch, batch.valid_B)
        penalty_BT = algorithm.kl.estimator(batch.behavior_logprobs_BT, reference_BT)
        penalty_B = torch.where(batch.mask_BT & batch.valid_B[:, None], penalty_BT, 0.0).sum(dim=1)
        batch = replace(batch, reward_B=batch.reward_B - kl_coefficient * penalty_B)

    advantages_BT = algorithm.advantage(batch)
    counted_BT = batch.mask_BT & batch.valid_B[:, None]
    if mask_truncated:
        counted_BT = counted_BT & ~batch.truncated_B[:, None]
    alive = _alive_groups(batch, advantages_BT)
    teaches_B = counted_BT.any(dim=1) & (alive[batch.group_B] if kl_in_loss else (advantages_BT != 0).any(dim=1))
    metrics = {"groups/dead_share": 1.0 - float(alive.float().mean())}

    if reference is not None and (kl_in_loss or not kl_coefficient):
        watched_B = teaches_B if kl_in_loss else batch.valid_B & (batch.group_B % WATCH_EVERY == 0)
        reference_BT = logprobs_of(reference, batch, watched_B)
    known_BT = batch.mask_BT & ~reference_BT.isnan()
    if known_BT.any():
        # k3 of the sampled decisions, whatever estimator the algorithm uses: never negative and of low variance.
        metrics["kl"] = float(k3(batch.behavior_logprobs_BT, reference_BT)[known_BT].mean())

    proximal_BT = logprobs_of(policy, batch, teaches_B) if optimizer_steps > 1 else None
    batch = replace(
        batch,
        mask_BT=counted_BT,
        advantages_BT=torch.where(counted_BT, advantages_BT, 0.0),
        weights_BT=algorithm.aggregation(counted_BT, count(counted_BT)).to(torch.float32),
        reference_logprobs_BT=reference_BT,
        proximal_logprobs_BT=proximal_BT,
    )
    metrics["decisions/trained"] = float(counted_BT[teaches_B].sum())
    metrics["update/rows"] = float(teaches_B.sum()) / rows
    return batch.select(teaches_B.nonzero()[:, 0]), metrics


@torch.no_grad()
def logprobs_of(policy: Policy, batch: Batch, wanted_B: Tensor) -> Tensor:
    """Log-probabilities under `policy` of the decisions of the wanted rows; NaN on the others. In nats."""
    logprobs_BT = torch.full_like(batch.behavior_logprobs_BT, math.nan)
    wanted = wanted_B.nonzero()[:, 0]
    chosen = batch.select(wanted)
    for rows in policy.microbatches(chosen):
        part = chosen.select(rows)
        evaluation = policy.evaluate(part)
        logprobs_BT[wanted[rows], : part.mask_BT.shape[1]] = evaluation.logprobs_BT.to(logprobs_BT)
    return logprobs_BT


def _alive_groups(batch: Batch, advantages_BT: Tensor) -> Tensor:
    """For every group: did some rollout do better than another?"""
    alive = torch.zeros(int(batch.group_B.max()) + 1, dtype=torch.bool)
    alive[batch.group_B[(advantages_BT != 0).any(dim=1)]] = True
    return alive
