"""The update: from annotated decisions to new weights.

    epochs -> minibatches (one optimizer step each) -> microbatches (one backward each)

Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from covey.algorithms import Algorithm, LossTerms
from covey.core.kl import k3
from covey.data import Batch, Critic, Policy, PolicyOutput
from covey.runtime.rng import permutation
from covey.runtime.timer import Measure, untimed


class StepResult(Protocol):
    grad_norm: float
    applied: bool


class Optimizer(Protocol):
    """Holds the fp32 master weights of a policy's module and the gradients that backward added up."""

    def step(self, learning_rate: float) -> StepResult:
        """Clip, apply and forget the gradients; a non-finite norm changes nothing."""


@dataclass(frozen=True)
class Learner:
    """What an update changes: the policy and, where the algorithm has a value loss, its critic."""

    policy: Policy
    optimizer: Optimizer
    critic: Critic | None = None
    critic_optimizer: Optimizer | None = None


@dataclass(frozen=True)
class UpdatePlan:
    """How often the rollouts of a step are gone through."""

    epochs: int = 1
    minibatches: int = 1
    single_decisions: bool = False  # minibatches are drawn from all decisions; else groups stay whole
    target_kl: float | None = None  # nats per decision away from the old policy that end the epochs of a step
    critic_epochs: int = 0  # further passes that only the critic learns from
    critic_warmup_steps: int = 0  # first steps that only the critic learns from

    def policy_epochs(self, step: int) -> int:
        """Passes that the policy learns from; `step` counts from 1."""
        return 0 if step <= self.critic_warmup_steps else self.epochs

    @property
    def optimizer_steps(self) -> int:
        """The policy's, of a step that it learns from."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class StepCoefficients:
    """The coefficients of one training step."""

    learning_rate: float
    critic_learning_rate: float = 0.0
    kl_coefficient: float = 0.0


def update(
    learner: Learner,
    algorithm: Algorithm,
    batch: Batch,
    plan: UpdatePlan,
    sizes: StepCoefficients,
    *,
    seed: int,
    step: int,
    measure: Measure = untimed,
) -> dict[str, float]:
    """Make the optimizer steps of one training step; returns its metrics. `measure` times their phases.

    The loss weights were fixed for the whole step (`prepare_batch`). A minibatch multiplies them by the number of
    minibatches, so that the mean of the minibatches' gradients is the gradient of the step, however it is cut.
    """
    gathered = _UpdateSums()
    policy_epochs = plan.policy_epochs(step)
    for epoch in range(policy_epochs):
        for minibatch in _minibatches(batch, plan, seed, step, epoch):
            for part in _microbatches(learner.policy, minibatch):
                with measure("time/forward"):
                    evaluation = learner.policy.evaluate(part)
                    part = part.to(evaluation.logprobs_BT.device)
                    terms = algorithm.loss(evaluation, part, sizes.kl_coefficient)
                loss = terms.loss
                if evaluation.values_BT is not None:  # one trunk, one backward
                    value_loss = algorithm.critic_loss(evaluation.values_BT, part)
                    gathered.add_critic(value_loss)
                    loss = loss + value_loss
                with measure("time/backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                gathered.add(part, evaluation, terms)
                if evaluation.values_BT is None:
                    _critic_backward(learner, algorithm, part, gathered, measure)
            with measure("time/optimizer"):
                gathered.finish(learner.optimizer.step(sizes.learning_rate))
            _step_critic(learner, sizes, gathered, measure)
        gathered.epochs += 1
        if plan.target_kl is not None and gathered.kl_of_epoch() > plan.target_kl:
            break
    for epoch in range(policy_epochs, plan.epochs + plan.critic_epochs):
        for minibatch in _minibatches(batch, plan, seed, step, epoch):
            for part in _microbatches(learner.policy, minibatch):
                _critic_backward(learner, algorithm, part, gathered, measure)
            _step_critic(learner, sizes, gathered, measure)
    gathered.critic_epochs = gathered.epochs + plan.epochs - policy_epochs + plan.critic_epochs
    return gathered.metrics(plan)


def _critic_backward(
    learner: Learner, algorithm: Algorithm, part: Batch, gathered: _UpdateSums, measure: Measure
) -> None:
    """Add the gradient of the value loss; nothing where there is no critic."""
    if learner.critic is None:
        return
    with measure("time/critic"):
        values_BT = learner.critic.values(part)
        loss = algorithm.critic_loss(values_BT, part.to(values_BT.device))
        loss.backward()  # type: ignore[no-untyped-call]
    gathered.add_critic(loss)


def _step_critic(learner: Learner, sizes: StepCoefficients, gathered: _UpdateSums, measure: Measure) -> None:
    if learner.critic_optimizer is not None:
        with measure("time/optimizer"):
            applied = learner.critic_optimizer.step(sizes.critic_learning_rate).applied
        gathered.critic_applied += applied
        gathered.skipped += not applied


def _minibatches(batch: Batch, plan: UpdatePlan, seed: int, step: int, epoch: int) -> Iterator[Batch]:
    """The batch in as many pieces as the plan wants, in an order that is a function of (seed, step, epoch)."""
    if not len(batch):
        return
    assert batch.loss_weights_BT is not None
    batch = replace(batch, loss_weights_BT=batch.loss_weights_BT * plan.minibatches)
    if plan.minibatches == 1:
        yield batch
    elif plan.single_decisions:
        decisions = batch.mask_BT.flatten().nonzero()[:, 0]
        for chosen in _shuffled(decisions, seed, step, epoch).tensor_split(plan.minibatches):
            if len(chosen):
                yield _only(batch, chosen)
    else:
        groups = _shuffled(batch.group_B.unique(), seed, step, epoch)
        for chosen in groups.tensor_split(plan.minibatches):
            if len(chosen):
                yield batch.select(torch.isin(batch.group_B, chosen).nonzero()[:, 0])


def _shuffled(items: Tensor, seed: int, step: int, epoch: int) -> Tensor:
    return items[torch.from_numpy(permutation(seed, step, epoch, len(items)))]


def _only(batch: Batch, decisions: Tensor) -> Batch:
    """The same rows with only these decisions (indices into the flattened mask) in the loss."""
    assert batch.loss_weights_BT is not None
    mask_BT = torch.zeros_like(batch.mask_BT)
    mask_BT.view(-1)[decisions] = True
    return replace(batch, mask_BT=mask_BT, loss_weights_BT=torch.where(mask_BT, batch.loss_weights_BT, 0.0))


def _microbatches(policy: Policy, minibatch: Batch) -> Iterator[Batch]:
    """Pieces that are small enough for one backward."""
    for rows in policy.microbatches(minibatch):
        yield minibatch if len(rows) == len(minibatch) else minibatch.select(rows)


class _UpdateSums:
    """Sums over the decisions of an update, read as metrics at its end."""

    def __init__(self) -> None:
        # Added up where the policy lives and read once, for reading waits.
        # Loss, clipped low, clipped high, entropy, KL, decisions:
        self.sums: Tensor | None = None
        self.sums_before_epoch: list[float] = [0.0] * 6
        self.mismatch = self.mismatch_kl = self.mismatch_decisions = 0.0
        self.reference_kl: float | None = None  # where the policy measures it, before the first optimizer step
        self.capped: Tensor | None = None
        self.log_ratio_max = torch.tensor(0.0)
        self.critic_loss: Tensor | None = None
        self.grad_norms: list[float] = []
        self.applied = self.critic_applied = self.skipped = self.epochs = self.critic_epochs = 0

    @torch.no_grad()
    def add(self, part: Batch, evaluation: PolicyOutput, terms: LossTerms) -> None:
        mask_BT = part.mask_BT
        old_to_new_BT = k3(torch.zeros_like(terms.log_ratio_BT), terms.log_ratio_BT)
        added = torch.stack(
            (
                terms.loss.detach(),
                terms.clipped_low_BT.sum(),
                terms.clipped_high_BT.sum(),
                torch.where(mask_BT, evaluation.entropy_BT, 0.0).sum(),
                old_to_new_BT.sum(),
                mask_BT.sum(),
            )
        )
        self.sums = added if self.sums is None else self.sums + added
        self.log_ratio_max = torch.maximum(self.log_ratio_max.to(added.device), terms.log_ratio_BT.max())
        if not self.grad_norms and not self.skipped:  # before the first optimizer step: sampler against trainer
            gap_N = (evaluation.logprobs_BT - part.behavior_logprobs_BT)[mask_BT]
            self.mismatch += float(gap_N.abs().sum())
            self.mismatch_kl += float(k3(torch.zeros_like(gap_N), gap_N).sum())
            self.mismatch_decisions += float(mask_BT.sum())
            if evaluation.kl_BT is not None:
                self.reference_kl = (self.reference_kl or 0.0) + float(evaluation.kl_BT[mask_BT].sum())
        if terms.capped_BT is not None:
            capped = terms.capped_BT.sum()
            self.capped = capped if self.capped is None else self.capped + capped

    def add_critic(self, loss: Tensor) -> None:
        self.critic_loss = loss.detach() if self.critic_loss is None else self.critic_loss + loss.detach()

    def finish(self, result: StepResult) -> None:
        self.applied += result.applied
        self.skipped += not result.applied
        if result.applied:
            self.grad_norms.append(result.grad_norm)

    def kl_of_epoch(self) -> float:
        """Mean k3 estimate of KL(old || current) over the decisions since the last call, in nats."""
        sums = [0.0] * 6 if self.sums is None else self.sums.tolist()
        kl, decisions = (sums[i] - self.sums_before_epoch[i] for i in (4, 5))
        self.sums_before_epoch = sums
        return float(kl / max(decisions, 1))

    def metrics(self, plan: UpdatePlan) -> dict[str, float]:
        loss, low, high, entropy, kl, count = [0.0] * 6 if self.sums is None else self.sums.tolist()
        decisions = max(count, 1)
        metrics = {
            "loss": loss / (max(self.epochs, 1) * plan.minibatches),
            "clip/low": low / decisions,
            "clip/high": high / decisions,
            "ratio/max": float(self.log_ratio_max.exp()),
            "update/optimizer_steps": float(self.applied),
            "update/skipped_steps": float(self.skipped),
            "update/epochs": float(self.epochs),
        }
        if count:
            metrics["entropy"] = entropy / decisions
            metrics["mismatch/mean"] = self.mismatch / max(self.mismatch_decisions, 1)
            metrics["mismatch/kl"] = self.mismatch_kl / max(self.mismatch_decisions, 1)
            metrics["kl/behavior"] = kl / decisions
        if self.reference_kl is not None:
            metrics["kl"] = self.reference_kl / max(self.mismatch_decisions, 1)
        if self.capped is not None:
            metrics["mismatch/capped_fraction"] = float(self.capped) / decisions
        if self.critic_loss is not None:
            metrics["loss/value"] = float(self.critic_loss) / (self.critic_epochs * plan.minibatches)
            metrics["update/critic_steps"] = float(self.critic_applied)
        if self.grad_norms:
            metrics["grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
        return metrics
