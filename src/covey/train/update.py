"""The update: trains the learners on the prepared batch of a step.

    learners -> epochs -> minibatches (one optimizer step each) -> shards -> microbatches (one backward pass each)

Shapes: B rollouts, T decisions.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from covey.data import Batch, Team
from covey.runtime.distributed import ALONE, own_shards, passes_over, shard_rows, shortest_row
from covey.runtime.rng import permutation
from covey.train.learners import Learner, UpdatePlan
from covey.train.metrics import Measure, UpdateMetrics, untimed


def update(
    learners: Sequence[Learner], batch: Batch, *, seed: int, step: int, measure: Measure = untimed, team: Team = ALONE
) -> dict[str, float]:
    """Make the optimizer steps of one training step.

    The loss weights were computed for the whole step (`prepare_batch`). A minibatch multiplies them by the number of
    minibatches, so that the mean of the minibatches' gradients is the gradient of the step for any division.

    Args:
        learners: the policy's first.
        batch: the prepared batch of the step.
        seed, step: with the epoch, they determine the order of the minibatches.
        measure: times the phases.
        team: each rank differentiates its own shards of every minibatch; the optimizers add the gradients.

    Returns:
        the metrics of the update.
    """
    metrics = UpdateMetrics(team)
    coefficients: dict[str, float] = {}
    for learner in learners:
        coefficients |= learner.coefficients(step)
        for epoch in learner.epochs(step):
            for minibatch in _minibatches(batch, learner.plan, seed, step, epoch):
                for part, counted in _microbatches(learner, minibatch, team, metrics):
                    learner.backward(part, step, counted, measure)
                with measure("time/optimizer"):
                    learner.optimizer_step(step, metrics)
            if learner.end_epoch(metrics):
                break
    return metrics.read(learners[0].plan.minibatches) | coefficients


def _minibatches(batch: Batch, plan: UpdatePlan, seed: int, step: int, epoch: int) -> Iterator[Batch]:
    """The minibatches of an epoch, in an order that is a function of (seed, step, epoch)."""
    if not len(batch):
        return
    batch = batch.scale_loss(plan.minibatches)
    if plan.minibatches == 1:
        yield batch
    elif plan.single_decisions:
        decisions = batch.mask_BT.flatten().nonzero()[:, 0]
        for chosen in _shuffled(decisions, seed, step, epoch).tensor_split(plan.minibatches):
            if len(chosen):
                yield batch.restrict(chosen)
    else:
        groups = _shuffled(batch.group_B.unique(), seed, step, epoch)
        for chosen in groups.tensor_split(plan.minibatches):
            if len(chosen):
                yield batch.select(torch.isin(batch.group_B, chosen).nonzero()[:, 0])


def _shuffled(items: Tensor, seed: int, step: int, epoch: int) -> Tensor:
    return items[torch.from_numpy(permutation(seed, step, epoch, len(items)))]


def _microbatches(
    learner: Learner, minibatch: Batch, team: Team, metrics: UpdateMetrics
) -> Iterator[tuple[Batch, UpdateMetrics]]:
    """The microbatches of this rank's shards of a minibatch, small enough for one backward pass each, and the metrics
    that count them. Passes that are made only because another rank has more have a loss of 0 and are not counted.
    """
    shards = shard_rows(minibatch, team.shards)
    for shard in own_shards(team):
        metrics.shard = shard
        chosen = minibatch if len(shards[shard]) == len(minibatch) else minibatch.select(shards[shard])
        parts = list(learner.microbatches(chosen)) if len(chosen) else []
        passes = passes_over(parts, lambda: shortest_row(minibatch), team)
        for number, (rows, counts) in enumerate(passes):
            if number == len(passes) - 1:
                learner.before_last_pass()
            if counts:
                yield (chosen if len(rows) == len(chosen) else chosen.select(rows)), metrics
            else:
                yield minibatch.select(rows).scale_loss(0), UpdateMetrics(team)
        if team.shards > 1:
            learner.end_shard()
