"""Supervised training of a policy on given decisions.

    loss = -sum_{i,t} m_{i,t} log pi(a_{i,t} | s_{i,t}) / sum_{i,t} m_{i,t}

The sums are over the decisions of an optimizer step. m is 1 for a decision and 0 for any other action, such as a
tool's reply, which is context. Shapes: B rollouts, T decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from covey.config import RunError
from covey.core.loss_weights import count, token_mean
from covey.core.schedules import Schedule
from covey.data import Batch, Policy
from covey.runtime.optimizer import MasterAdamW
from covey.runtime.rng import permutation

Item = TypeVar("Item")


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

    def state_dict(self) -> dict[str, Any]:
        """The weights with the optimizer's moments, and the number of steps; not copied."""
        return {"optimizer": self.optimizer.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, bit for bit."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])


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


def batches_per_epoch(items: int, batch_size: int) -> int:
    """Number of optimizer steps of an epoch."""
    return -(-items // batch_size)


def shuffled_batches(
    items: Sequence[Item], batch_size: int, *, seed: int, epochs: int, done: int = 0
) -> Iterator[list[Item]]:
    """The items of every optimizer step after the first `done`, in an order that is a function of (seed, epoch)."""
    per_epoch = batches_per_epoch(len(items), batch_size)
    for step in range(done, epochs * per_epoch):
        epoch, place = divmod(step, per_epoch)
        order = permutation(seed, 0, epoch, len(items))
        yield [items[number] for number in order[place * batch_size : (place + 1) * batch_size]]


def train_supervised(
    trainer: SupervisedTrainer, batches: Iterable[Batch], on_step: Callable[[int, dict[str, float]], bool]
) -> None:
    """Train on each batch; `on_step` gets the step and its metrics, and training ends if it returns False."""
    for batch in batches:
        metrics = trainer.train_step(batch)
        if not on_step(trainer.step, metrics):
            return
