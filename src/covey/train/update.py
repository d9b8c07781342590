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

from covey.algorithms import Algorithm
from covey.data import Batch, Critic, Policy
from covey.runtime.optimizer import StepResult
from covey.runtime.rng import permutation
from covey.runtime.timer import Measure, untimed
from covey.train.metrics import UpdateMetrics


class Optimizer(Protocol):
    """Holds the fp32 master weights of a policy's module and the gradients that backward added up."""

    def step(self, learning_rate: float) -> StepResult:
        """Clip, apply and forget the gradients; a non-finite norm changes nothing."""


@dataclass(frozen=True)
class Learner:
    """The models that an update changes: the policy and, if the algorithm has a value loss, its critic."""

    policy: Policy
    optimizer: Optimizer
    critic: Critic | None = None
    critic_optimizer: Optimizer | None = None


@dataclass(frozen=True)
class UpdatePlan:
    """Epochs and minibatches of an update."""

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
    metrics = UpdateMetrics()
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
                    metrics.add_critic(value_loss)
                    loss = loss + value_loss
                with measure("time/backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                metrics.add(part, evaluation, terms)
                if evaluation.values_BT is None:
                    _critic_backward(learner, algorithm, part, metrics, measure)
            with measure("time/optimizer"):
                metrics.finish(learner.optimizer.step(sizes.learning_rate))
            _step_critic(learner, sizes, metrics, measure)
        metrics.epochs += 1
        if plan.target_kl is not None and metrics.kl_of_epoch() > plan.target_kl:
            break
    for epoch in range(policy_epochs, plan.epochs + plan.critic_epochs):
        for minibatch in _minibatches(batch, plan, seed, step, epoch):
            for part in _microbatches(learner.policy, minibatch):
                _critic_backward(learner, algorithm, part, metrics, measure)
            _step_critic(learner, sizes, metrics, measure)
    metrics.critic_epochs = metrics.epochs + plan.epochs - policy_epochs + plan.critic_epochs
    return metrics.read(plan.minibatches)


def _critic_backward(
    learner: Learner, algorithm: Algorithm, part: Batch, metrics: UpdateMetrics, measure: Measure
) -> None:
    """Add the gradient of the value loss; nothing without a critic."""
    if learner.critic is None:
        return
    with measure("time/critic"):
        values_BT = learner.critic.values(part)
        loss = algorithm.critic_loss(values_BT, part.to(values_BT.device))
        loss.backward()  # type: ignore[no-untyped-call]
    metrics.add_critic(loss)


def _step_critic(learner: Learner, sizes: StepCoefficients, metrics: UpdateMetrics, measure: Measure) -> None:
    if learner.critic_optimizer is not None:
        with measure("time/optimizer"):
            applied = learner.critic_optimizer.step(sizes.critic_learning_rate).applied
        metrics.critic_applied += applied
        metrics.skipped += not applied


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
