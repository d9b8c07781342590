"""Supervised training on examples: the loss is a mean over the terms of a minibatch, such as tokens or pairs.

With several ranks (`runtime/distributed.py`) a minibatch is divided into logical shards. The terms of the whole
minibatch are counted, so the sum of the shards' gradients is its gradient. Shapes: B rollouts, T decisions.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from covey.config import RunError
from covey.core.loss_weights import Counts, token_mean
from covey.core.precision import widened
from covey.core.schedules import Schedule
from covey.data import Batch, Checkpoints, Observer, Policy, StepRecord, Team, TrainingExample
from covey.runtime.distributed import ALONE, check_agreement, of_all_shards, own_shards, passes_over, shard_examples
from covey.runtime.optimizer import MasterAdamW
from covey.train.loop import repeat
from covey.train.metrics import added
from covey.train.state import Limits, Progress

Examples = Sequence[TrainingExample]


class Criterion(Protocol):
    """A model with the loss that a training on examples lowers."""

    name: str  # first part of the metrics' names
    rate_option: str  # what sets the learning rate

    def terms(self, examples: Sequence[Any]) -> int:
        """Number of terms of the examples in the loss."""

    def microbatches(self, examples: Sequence[Any]) -> Sequence[Any]:
        """The examples in parts, small enough for one backward pass each."""

    def share(self, part: Any, terms: int) -> tuple[Tensor, dict[str, float]]:
        """The losses of a part divided by the number of all terms, and sums whose means over the terms are metrics."""

    def counts(self, examples: Sequence[Any]) -> dict[str, float]:
        """Metrics of the size of a minibatch."""


class SupervisedTrainer:
    """A model with its optimizer, trained to lower a mean loss; implements `covey.data.ExampleTrainer`."""

    def __init__(
        self, criterion: Criterion, optimizer: MasterAdamW, learning_rate: Schedule, team: Team = ALONE
    ) -> None:
        """`optimizer` has the same team."""
        self.criterion = criterion
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.team = team
        self.step = 0  # optimizer steps so far

    def train_step(self, examples: Examples) -> dict[str, float]:
        """One optimizer step on a minibatch, of which each rank computes its shards. The gradient does not depend on
        the division into shards and microbatches.

        Returns:
            loss, size of the minibatch, gradient norm, learning rate and the criterion's means.

        Raises:
            RunError: if the loss or its gradient is not finite; the weights are unchanged.
        """
        name, terms = self.criterion.name, self.criterion.terms(examples)
        loss, sums = self._accumulate(examples, terms)
        rate = self.learning_rate(self.step + 1)
        result = self.optimizer.step(rate)
        if not result.applied:
            raise RunError(
                f"the loss ({loss:g}) or its gradient is not finite in step {self.step + 1}: lower "
                f"{self.criterion.rate_option}"
            )
        self.step += 1
        metrics = {"loss": loss, **self.criterion.counts(examples)}
        return {
            **{f"{name}/{key}": value for key, value in metrics.items()},
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            **{f"{name}/{key}": total / terms for key, total in sums.items()},
        }

    def _accumulate(self, examples: Examples, terms: int) -> tuple[float, dict[str, float]]:
        """Accumulate the gradient of this rank's shards; returns the loss and the sums of all shards."""
        own: list[list[Any]] = []
        for passes in own_passes(self.criterion, examples, self.team):
            loss, sums = 0.0, dict[str, float]()
            for number, (part, is_counted) in enumerate(passes):
                if number == len(passes) - 1:
                    self.optimizer.before_last_pass()
                share, found = self.criterion.share(part, terms)
                (share if is_counted else share * 0).backward()
                if is_counted:
                    loss += float(share.detach())
                    sums = added([sums, found])
            if self.team.shards > 1:
                self.optimizer.end_shard()
            own.append([loss, sums])
        losses, sums_of_shards = zip(*of_all_shards(self.team, own), strict=True)
        return sum(losses), added(sums_of_shards)

    def state_dict(self) -> dict[str, Any]:
        """The weights with the optimizer's moments, and the number of steps; not copied."""
        return {"optimizer": self.optimizer.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, bit for bit.

        Raises:
            ConfigError: if it belongs to another model.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])


def own_passes(criterion: Criterion, examples: Examples, team: Team) -> Iterator[list[tuple[Any, bool]]]:
    """For each shard of this rank its microbatches, each with whether it counts (`passes_over`)."""
    shards = shard_examples(examples, team.shards)
    for shard in own_shards(team):
        parts = criterion.microbatches(shards[shard]) if shards[shard] else ()
        yield passes_over(parts, lambda: criterion.microbatches([min(examples, key=lambda one: one.tokens)])[0], team)


@dataclass(frozen=True)
class Likelihood:
    """Maximises the likelihood of given decisions under a policy; a `Criterion`.

        loss = -sum_{i,t} m_{i,t} log pi(a_{i,t} | s_{i,t}) / sum_{i,t} m_{i,t}

    The sums are over the decisions of an optimizer step. m is 1 for a decision and 0 for any other action, such as a
    tool's reply, which is context.
    """

    policy: Policy
    batch_of: Callable[[Sequence[Any]], Batch]  # of some examples
    name = "sft"
    rate_option = "sft.learning_rate"

    def terms(self, examples: Sequence[Any]) -> int:
        """Number of decisions."""
        return sum(one.trained for one in examples)

    def microbatches(self, examples: Sequence[Any]) -> Sequence[Batch]:
        """The examples in batches."""
        batch = self.batch_of(examples)
        return [batch.select(rows) for rows in self.policy.microbatches(batch)]

    def share(self, part: Batch, terms: int) -> tuple[Tensor, dict[str, float]]:
        """The losses of a batch divided by `terms`."""
        logprobs_BT = self.policy.evaluate(part).logprobs_BT
        weights_BT = token_mean(part.mask_BT, Counts(len(part), terms)).to(logprobs_BT.device)
        return -(weights_BT * logprobs_BT).sum(), {}

    def counts(self, examples: Sequence[Any]) -> dict[str, float]:
        """The number of decisions."""
        return {"decisions": float(self.terms(examples))}


@torch.no_grad()
def mean_loss(criterion: Likelihood, minibatches: Iterable[Examples], team: Team = ALONE) -> float:
    """The loss over all decisions of some minibatches, in nats per decision. Every rank must call it."""
    own = [[0.0, 0] for _ in own_shards(team)]
    for examples in minibatches:
        for sums, passes in zip(own, own_passes(criterion, examples, team), strict=True):
            for part, is_counted in passes:
                logprobs_BT = criterion.policy.evaluate(part).logprobs_BT
                if is_counted:
                    sums[0] -= float(widened(logprobs_BT).sum())
                    sums[1] += int(part.mask_BT.sum())
    total, decisions = added(of_all_shards(team, own))
    return float(total / decisions)


@dataclass(frozen=True)
class SupervisedRun:
    """The components of a supervised training; implements `covey.train.state.Trainable`."""

    trainer: SupervisedTrainer
    batches: Callable[[int], Iterator[Any]]  # the batches after so many steps
    steps_per_epoch: int
    evaluate: Callable[[int], dict[str, float]] = lambda step: {}
    observers: Sequence[Observer] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    @property
    def team(self) -> Team:
        """The ranks that train together."""
        return self.trainer.team

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
        if run.team.size > 1:
            facts = metrics | {"weights": run.trainer.optimizer.checksum()}
            check_agreement((), facts, run.team, f"step {progress.step}")
        metrics[f"{run.trainer.criterion.name}/epoch"] = progress.step / run.steps_per_epoch
        metrics["time/step"] = time.perf_counter() - began
        return StepRecord(progress.step, metrics, (), ())

    repeat(step, run, limits, progress, should_stop)
