"""Prepares a batch for the update: values, advantages, loss weights, old and reference log-probabilities.

Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import Algorithm, KLPlacement
from covey.config import ConfigError
from covey.core.kl import k3
from covey.core.loss_weights import count
from covey.data import Batch, Critic, Policy, PolicyOutput, Team
from covey.runtime.distributed import ALONE, fill_rows, own_shards, passes_over, shard_rows, shortest_row
from covey.runtime.rng import CLIPPING, uniforms
from covey.train.metrics import value_metrics


class NoReference:
    """Null object for a run without a reference policy; implements `covey.data.Policy`."""

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Never called."""
        raise NotImplementedError

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        """Never called: `score_rows` makes no pass, not even one of those that sharded weights need on every rank."""
        raise NotImplementedError


NO_REFERENCE = NoReference()


@dataclass(frozen=True)
class Prepared:
    """All rows of a step with the inputs of the update."""

    rows: Batch  # its mask is True at the decisions that count in the loss
    kept_B: Tensor  # bool, True at the rows that have a gradient
    decided_BT: Tensor  # bool, True at all decisions
    advantages_BT: Tensor  # of all decisions, also of those that do not count in the loss
    metrics: dict[str, float]  # of the whole step

    def batch(self) -> Batch:
        """The rows that have a gradient."""
        return self.rows if self.kept_B.all() else self.rows.select(self.kept_B.nonzero()[:, 0])

    def of_step(self) -> Prepared:
        """The same without the rows of earlier steps."""
        if not self.rows.has_replayed:
            return self
        own = self.rows.fresh_B.nonzero()[:, 0]
        rows = replace(self.rows, mask_BT=self.decided_BT).select(own)
        decided_BT = rows.mask_BT
        mask_BT, advantages_BT = (
            value_BT[own, : decided_BT.shape[1]] for value_BT in (self.rows.mask_BT, self.advantages_BT)
        )
        rows = replace(rows, mask_BT=mask_BT, replayed_B=None)
        return replace(self, rows=rows, kept_B=self.kept_B[own], decided_BT=decided_BT, advantages_BT=advantages_BT)

    def in_update(self, groups: int) -> list[bool]:
        """For each of the first `groups` groups, whether a row of it has a gradient."""
        kept = set(self.rows.group_B[self.kept_B].tolist())
        return [group in kept for group in range(groups)]


def prepare_batch(batch: Batch, policy: Policy, algorithm: Algorithm, **options: Any) -> tuple[Batch, dict[str, float]]:
    """The rows of `prepare_rows` that have a gradient, and its metrics."""
    prepared = prepare_rows(batch, policy, algorithm, **options)
    return prepared.batch(), prepared.metrics


def prepare_rows(
    batch: Batch,
    policy: Policy,
    algorithm: Algorithm,
    *,
    reference: Policy = NO_REFERENCE,
    critics: Sequence[Critic] = (),
    kl_coefficient: float = 0.0,
    optimizer_steps: int = 1,
    mask_truncated: bool = False,
    seed: int = 0,
    step: int = 1,
    team: Team = ALONE,
) -> Prepared:
    """Compute the inputs of the update, once per step: values, advantages, loss weights, old and reference
    log-probabilities.

    Args:
        batch: all rows of the step, as `covey.data.collate` returns them. The metrics but "decisions/trained" leave
            out those that an earlier step sampled.
        policy: computes the old log-probabilities if the update has more than one optimizer step.
        algorithm: defines advantages, KL and loss weights.
        reference: reference policy of the KL.
        critics: the critic of the algorithm's value loss; empty if the algorithm has none.
        kl_coefficient: coefficient of this step.
        optimizer_steps: number of optimizer steps of the policy on this batch.
        mask_truncated: exclude truncated rollouts from the loss; the baseline still includes their rewards.
        seed, step: they determine the random choice of Clip-Cov.
        team: its ranks evaluate the rows together; everything else is computed on every rank from the same numbers.

    Returns:
        The rows and metrics of the step. A row has a gradient if a decision of it has a non-zero advantage; or if the
        loss has a KL, entropy or KL-Cov term and some rollout of its group has a non-zero advantage; or if it has a
        teacher, or there is a critic.

    Raises:
        ConfigError: if the algorithm needs a reference policy or a critic that is missing, or if a critic is given to
            an algorithm without a value loss; or if rows of earlier steps are given to an algorithm that cannot use
            them.
    """
    kl = algorithm.kl.acting(kl_coefficient)
    _check_components(algorithm, kl, reference, critics, kl_coefficient)
    _check_replay(batch, algorithm, kl)
    reward_scores = score_rows(reference, batch, kl.rows_for_reward(batch), team)
    batch = kl.penalise(batch, reward_scores["logprobs_BT"], kl_coefficient)
    for critic in critics:
        batch = _with_values(batch, policy, critic, team)

    advantages_BT, returns_BT = algorithm.estimate_advantages(batch)
    counted_BT = batch.mask_BT & batch.valid_B[:, None]
    if mask_truncated:
        counted_BT = counted_BT & ~batch.truncated_B[:, None]
    signal_G = has_signal(batch, advantages_BT)
    by_group = kl.in_loss or bool(algorithm.entropy_coefficient) or algorithm.high_covariance.in_loss
    signal_B = signal_G[batch.group_B] if by_group else (advantages_BT != 0).any(dim=1)
    kept_B = counted_BT.any(dim=1) & (signal_B | algorithm.distillation.rows(batch) | bool(critics))
    fresh_B = batch.fresh_B
    metrics = {
        "groups/zero_advantage_fraction": 1.0 - float(signal_G[batch.group_B[fresh_B].unique()].float().mean()),
        "decisions/trained": float(counted_BT[kept_B].sum()),
        "update/rows": float(kept_B[fresh_B].sum()) / int(fresh_B.sum()),
    }

    loss_scores = score_rows(reference, batch, kl.rows_for_loss(batch, kept_B), team)
    reference_BT = torch.where(
        reward_scores["logprobs_BT"].isnan(), loss_scores["logprobs_BT"], reward_scores["logprobs_BT"]
    )
    metrics |= _kl_metric(batch, reference_BT)
    if critics:
        metrics |= value_metrics(batch, returns_BT, counted_BT)
    old_scores = score_rows(policy, batch, kept_B, team) if optimizer_steps > 1 else {}
    rows = replace(
        batch,
        mask_BT=counted_BT,
        advantages_BT=torch.where(counted_BT, advantages_BT, 0.0),
        returns_BT=returns_BT,
        loss_weights_BT=_loss_weights(batch, algorithm, counted_BT),
        reference_logprobs_BT=reference_BT,
        reference_all_logprobs_BTV=loss_scores.get("all_logprobs_BTV"),
        proximal_logprobs_BT=old_scores.get("logprobs_BT"),
        proximal_all_logprobs_BTV=old_scores.get("all_logprobs_BTV"),
    )
    live_BT = counted_BT & signal_G[batch.group_B][:, None]
    rows, of_covariance = algorithm.high_covariance.choose(rows, live_BT, partial(_uniform, seed, step))
    return Prepared(rows, kept_B, batch.mask_BT, advantages_BT, metrics | of_covariance)


def _uniform(seed: int, step: int, mask_BT: Tensor) -> Tensor:
    """Uniform numbers for the decisions of a mask, functions of (seed, step, row, column); 0 elsewhere."""
    row_N, column_N = mask_BT.nonzero(as_tuple=True)
    uniform_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    drawn_N = uniforms(seed, step, 0, row_N.numpy(), column_N.numpy(), stream=CLIPPING)
    uniform_BT[row_N, column_N] = torch.from_numpy(drawn_N)
    return uniform_BT


def _loss_weights(batch: Batch, algorithm: Algorithm, counted_BT: Tensor) -> Tensor:
    """loss_weights_BT: those of the algorithm, times the weight of each group."""
    weights_BT = algorithm.aggregation(counted_BT, count(counted_BT)).to(torch.float32)
    return weights_BT if batch.group_weight_B is None else weights_BT * batch.group_weight_B[:, None]


@torch.no_grad()
def score_rows(policy: Policy, batch: Batch, wanted_B: Tensor, team: Team = ALONE) -> dict[str, Tensor]:
    """Log-probabilities of the decisions of some rows under `policy`, in nats.

    Args:
        policy: evaluates the rows, a microbatch at a time.
        batch: the rows of the step.
        wanted_B: bool, True at the rows to evaluate.
        team: each rank evaluates its own shards of them.

    Returns:
        "logprobs_BT", NaN on the other rows; and "all_logprobs_BTV", 0 on the other rows, if the policy's output has
        the log-probability of every action.
    """
    scores = {"logprobs_BT": torch.full_like(batch.behavior_logprobs_BT, math.nan)}
    if policy is NO_REFERENCE or not wanted_B.any():
        return scores
    shards = shard_rows(batch, team.shards, wanted_B)
    for rows, part in _by_microbatch(policy, batch, shards, team):
        width = part.mask_BT.shape[1]
        for name, value in policy.evaluate(part).scores().items():
            if name not in scores:
                scores[name] = batch.behavior_logprobs_BT.new_zeros(*batch.mask_BT.shape, *value.shape[2:])
            scores[name][rows, :width] = value.to(scores[name])[: len(rows)]
    fill_rows(scores["logprobs_BT"], shards, team)
    return scores


def _by_microbatch(
    policy: Policy, batch: Batch, shards: Sequence[Tensor], team: Team
) -> Iterator[tuple[Tensor, Batch]]:
    """Microbatches of the rows of this rank's shards: (row indices, microbatch). Passes that are made only because
    another rank has more have no row index and a microbatch of one row.
    """
    for shard in (shards[number] for number in own_shards(team)):
        chosen = batch if len(shard) == len(batch) else batch.select(shard)
        parts = list(policy.microbatches(chosen)) if len(shard) else []
        for rows, counts in passes_over(parts, lambda: shortest_row(batch), team):
            yield (shard[rows], chosen.select(rows)) if counts else (shard[:0], batch.select(rows))


@torch.no_grad()
def _with_values(batch: Batch, policy: Policy, critic: Critic, team: Team) -> Batch:
    """The batch with the critic's value of every state, and the bootstrap value of each row.

    The bootstrap value is 0 if the episode is over. A time limit or the end of a fragment does not end an episode.
    """
    values_BT = torch.zeros_like(batch.behavior_logprobs_BT)
    bootstrap_value_B = torch.zeros_like(batch.reward_B)
    shards = shard_rows(batch, team.shards, batch.valid_B)
    for rows, part in _by_microbatch(policy, batch, shards, team):
        values_BT[rows, : part.mask_BT.shape[1]] = critic.values(part).to(values_BT)[: len(rows)]
        bootstrap_value_B[rows] = critic.bootstrap_values(part).to(bootstrap_value_B)[: len(rows)]
    for value_B in (values_BT, bootstrap_value_B):
        fill_rows(value_B, shards, team)
    return replace(batch, values_BT=values_BT, bootstrap_value_B=torch.where(batch.truncated_B, bootstrap_value_B, 0.0))


def has_signal(batch: Batch, advantages_BT: Tensor) -> Tensor:
    """signal_G, bool: True if a decision of the group has a non-zero advantage."""
    signal_G = torch.zeros(int(batch.group_B.max()) + 1, dtype=torch.bool)
    signal_G[batch.group_B[(advantages_BT != 0).any(dim=1)]] = True
    return signal_G


def _kl_metric(batch: Batch, reference_BT: Tensor) -> dict[str, float]:
    """Mean k3 estimate of the KL to the reference, if it was evaluated. It is k3 for every algorithm, because k3 is
    never negative and has a low variance.
    """
    known_BT = batch.mask_BT & batch.fresh_B[:, None] & ~reference_BT.isnan()
    if not known_BT.any():
        return {}
    return {"kl": float(k3(batch.behavior_logprobs_BT, reference_BT)[known_BT].mean())}


def _check_components(
    algorithm: Algorithm, kl: KLPlacement, reference: Policy, critics: Sequence[Critic], kl_coefficient: float
) -> None:
    if kl.needs_reference and reference is NO_REFERENCE:
        raise ConfigError(
            f"the KL coefficient is {kl_coefficient} but there is no reference policy: give one or set it to 0"
        )
    if algorithm.needs_critic != bool(critics):
        fault, remedy = ("has no value loss", "leave the critic out") if critics else ("needs a critic", "give it one")
        raise ConfigError(f"the algorithm {algorithm.name} {fault}: {remedy}")


def _check_replay(batch: Batch, algorithm: Algorithm, kl: KLPlacement) -> None:
    if not batch.has_replayed:
        return
    if not algorithm.importance:
        raise ConfigError(f"the algorithm {algorithm.name} has no importance weights for the rows of earlier steps")
    if algorithm.needs_critic or kl.rows_for_reward(batch).any():
        raise ConfigError(
            f"the algorithm {algorithm.name} has a critic or a KL in the reward, which belong to the policy that "
            "sampled, so it cannot use the rows of earlier steps"
        )
