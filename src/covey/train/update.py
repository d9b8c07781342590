"""The update: from annotated decisions to new weights.

    epochs -> minibatches (one optimizer step each) -> microbatches (one backward each)

Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from covey.algorithms import Algorithm, LossTerms
from covey.data import Batch, Evaluation, Policy
from covey.runtime.seeding import permutation


class StepResult(Protocol):
    grad_norm: float
    applied: bool


class Optimizer(Protocol):
    """Holds the fp32 master weights of a policy's module and the gradients that backward added up."""

    def step(self, learning_rate: float) -> StepResult:
        """Clip, apply and forget the gradients; a non-finite norm changes nothing."""


@dataclass(frozen=True)
class UpdatePlan:
    """How often the rollouts of a step are gone through."""

    epochs: int = 1
    minibatches: int = 1

    @property
    def optimizer_steps(self) -> int:
        return self.epochs * self.minibatches


def update(
    policy: Policy,
    optimizer: Optimizer,
    algorithm: Algorithm,
    batch: Batch,
    plan: UpdatePlan,
    *,
    learning_rate: float,
    kl_coefficient: float,
    seed: int,
    step: int,
) -> dict[str, float]:
    """Make the optimizer steps of one training step; returns its metrics.

    The weights of the losses were fixed for the whole step (`annotate`). A minibatch multiplies them by the number of
    minibatches, so that the mean of the minibatches' gradients is the gradient of the step, however it is cut.
    """
    gathered = _Gathered()
    for epoch in range(plan.epochs):
        for rows in _minibatches(batch, plan.minibatches, seed, step, epoch):
            minibatch = batch.select(rows)
            assert minibatch.weights_BT is not None
            minibatch = replace(minibatch, weights_BT=minibatch.weights_BT * plan.minibatches)
            for micro in policy.microbatches(minibatch):
                part = minibatch.select(micro)
                evaluation = policy.evaluate(part)
                part = part.to(evaluation.logprobs_BT.device)
                terms = algorithm.loss(evaluation, part, kl_coefficient)
                terms.loss.backward()  # type: ignore[no-untyped-call]
                gathered.add(part, evaluation, terms)
            gathered.finish(optimizer.step(learning_rate))
    return gathered.metrics(plan)


def _minibatches(batch: Batch, count: int, seed: int, step: int, epoch: int) -> Iterator[Tensor]:
    """Rows of `count` minibatches. A group stays whole; the order is a function of (seed, step, epoch)."""
    groups = batch.group_B.unique()
    if count > 1:
        groups = groups[torch.from_numpy(permutation(seed, step, epoch, len(groups)))]
    for chosen in groups.tensor_split(count):
        if len(chosen):
            yield torch.isin(batch.group_B, chosen).nonzero()[:, 0]


class _Gathered:
    """Sums over the decisions of an update, read as metrics at its end."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.decisions = 0
        self.ratio_max = 1.0
        self.grad_norms: list[float] = []
        self.applied = 0
        self.skipped = 0

    @torch.no_grad()
    def add(self, part: Batch, evaluation: Evaluation, terms: LossTerms) -> None:
        mask_BT = part.mask_BT
        self.decisions += int(mask_BT.sum())
        self.sums["loss"] += float(terms.loss)
        self.sums["clip/low"] += float(terms.clipped_low_BT.sum())
        self.sums["clip/high"] += float(terms.clipped_high_BT.sum())
        self.sums["entropy"] += float(evaluation.entropy_BT[mask_BT].sum())
        if not self.grad_norms and not self.skipped:  # before the first optimizer step: sampler against trainer
            gap_BT = (evaluation.logprobs_BT - part.behavior_logprobs_BT).abs()
            self.sums["mismatch"] += float(gap_BT[mask_BT].sum())
            self.sums["mismatch_decisions"] += float(mask_BT.sum())
        self.ratio_max = max(self.ratio_max, float(terms.log_ratio_BT.max().exp()))

    def finish(self, result: StepResult) -> None:
        self.applied += result.applied
        self.skipped += not result.applied
        if result.applied:
            self.grad_norms.append(result.grad_norm)

    def metrics(self, plan: UpdatePlan) -> dict[str, float]:
        decisions = max(self.decisions, 1)
        metrics = {
            "loss": self.sums["loss"] / plan.optimizer_steps,
            "clip/low": self.sums["clip/low"] / decisions,
            "clip/high": self.sums["clip/high"] / decisions,
            "ratio/max": self.ratio_max,
            "update/optimizer_steps": float(self.applied),
            "update/skipped_steps": float(self.skipped),
        }
        if self.decisions:
            metrics["entropy"] = self.sums["entropy"] / decisions
            metrics["mismatch/mean"] = self.sums["mismatch"] / max(self.sums["mismatch_decisions"], 1)
        if self.grad_norms:
            metrics["grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
        return metrics
