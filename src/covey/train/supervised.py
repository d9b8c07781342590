"""Supervised training of a policy on given decisions.

    loss = -sum_{i,t} m_{i,t} log pi(a_{i,t} | s_{i,t}) / sum_{i,t} m_{i,t}

The sums are over the decisions of an optimizer step. m is 1 for a decision and 0 for any other action, such as a
tool's reply, which is context. Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from covey.config import RunError
from covey.core.loss_weights import count, token_mean
from covey.core.schedules import Schedule
from covey.data import Batch, Checkpoints, Observer, Policy, StepRecord, Team
from covey.runtime.distributed import ALONE
from covey.runtime.optimizer import MasterAdamW
from covey.train.loop import repeat
from covey.train.state import Limits, Progress


class Trainer(Protocol):
    """A model with its optimizer, trained on batches of examples."""

    step: int  # optimizer steps so far

    @property
    def optimizer(self) -> MasterAdamW:
        """The optimizer, whose state has the weights."""

    def train_step(self, batch: Any) -> dict[str, float]:
        """One optimizer step; returns its metrics."""


class SupervisedTrainer:
    """A policy with its optimizer, trained to maximise the likelihood of given decisions."""

    def __init__(self, policy: Policy, optimizer: MasterAdamW, learning_rate: Schedule) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.step = 0  # optimizer steps so far

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; the gradient does not depend on the division into microbatches.

        Returns:
            loss, number of decisions, gradient norm and learning rate.

        Raises:
            RunError: if the loss or its gradient is not finite; the weights are unchanged.
        """
        loss = self._accumulate(batch)
        rate = self.learning_rate(self.step + 1)
        result = self.optimizer.step(rate)
        if not result.applied:
            raise RunError(
                f"the loss ({loss:g}) or its gradient is not finite in step {self.step + 1}: lower sft.learning_rate"
            )
        self.step += 1
        decisions = float(batch.mask_BT.sum())
        return {"sft/loss": loss, "sft/decisions": decisions, "grad_norm": result.grad_norm, "learning_rate": rate}

    def _accumulate(self, batch: Batch) -> float:
        """Accumulate the gradient of the loss; returns the loss."""
        weights_BT = token_mean(batch.mask_BT, count(batch.mask_BT))
        total = 0.0
        for rows in self.policy.microbatches(batch):
            logprobs_BT = self.policy.evaluate(batch.select(rows)).logprobs_BT
            part_BT = weights_BT[rows, : logprobs_BT.shape[1]].to(logprobs_BT.device)
            loss = -(part_BT * logprobs_BT).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total


@torch.no_grad()
def mean_loss(policy: Policy, batches: Iterable[Batch]) -> float:
    """The loss over all decisions of some batches, in nats per decision."""
    total, decisions = 0.0, 0
    for batch in batches:
        for rows in policy.microbatches(batch):
            part = batch.select(rows)
            total -= float(policy.evaluate(part).logprobs_BT.double().sum())
            decisions += int(part.mask_BT.sum())
    return total / decisions


@dataclass(frozen=True)
class SupervisedRun:
    """The components of a supervised training; implements `covey.train.state.Trainable`."""

    name: str  # first part of the metrics' names
    trainer: Trainer
    batches: Callable[[int], Iterator[Any]]  # the batches after so many steps
    steps_per_epoch: int
    evaluate: Callable[[int], dict[str, float]] = lambda step: {}
    observers: Sequence[Observer] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    team: Team = ALONE

    def stateful(self) -> dict[str, Any]:
        """The optimizer, which has the weights."""
        return {"optimizer": self.trainer.optimizer}

    def begin_at(self, progress: Progress) -> None:
        """Continue the schedule of the learning rate."""
        self.trainer.step = progress.step


def train_supervised(
    run: SupervisedRun, limits: Limits, progress: Progress, *, should_stop: Callable[[], bool]
) -> None:
    """Train on examples as `covey.train.loop.repeat` says."""
    batches = run.batches(progress.step)

    def step() -> StepRecord:
        began = time.perf_counter()
        metrics = run.trainer.train_step(next(batches))
        progress.step += 1
        metrics[f"{run.name}/epoch"] = progress.step / run.steps_per_epoch
        metrics["time/step"] = time.perf_counter() - began
        return StepRecord(progress.step, metrics, (), ())

    repeat(step, run, limits, progress, should_stop)
