"""Random training steps, and what covey makes of them.

Shapes: B rollouts, T decisions.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.core.loss_weights import Counts, count
from covey.data import Batch, EndReason, Group, PolicyOutput, Rollout, Start, collate

GROUPS, GROUP_SIZE, WIDTH = 4, 4, 9
ROWS = GROUPS * GROUP_SIZE


@dataclass(frozen=True)
class Case:
    """Log-probabilities that four policies give the same decisions, in nats, and what the rollouts earned."""

    logprobs_BT: Tensor
    old_BT: Tensor  # the policy before the update, by the trainer
    reference_BT: Tensor
    sampler_BT: Tensor  # the policy before the update, by the sampler
    mask_BT: Tensor  # decisions of the policy; a hole is what a tool said
    lengths_B: Tensor  # holes included
    finished_B: Tensor  # False where the token limit cut the completion
    rewards: list[float | None]  # None: the grader failed
    parts: list[list[float | None]] = field(default_factory=list)  # rewards of several functions, one list for each


def random_case(seed: int, *, spread: float = 0.3, on_policy: bool = False, ungraded: int = 0) -> Case:
    """A case whose rows have unequal lengths, one of them a single decision and one cut by the limit.

    `spread` is how far the policies are from each other, in nats; `on_policy`: the first step after sampling. Rewards
    are multiples of 1/8, which are exact in TRL's float32; the rewards of the second group are all alike. Every third
    case has holes in its mask.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    lengths_B = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    lengths_B[seed % ROWS], lengths_B[(seed + 5) % ROWS] = 1, WIDTH
    finished_B = torch.rand(ROWS, generator=generator) > 0.2
    finished_B[(seed + 5) % ROWS] = False
    old_BT = -(0.8 * normal()).exp()
    drift_B1 = normal()[:, :1]  # so that the mean ratio of a rollout is clipped as well
    decided_BT = normal() > -0.5 if seed % 3 == 2 else torch.ones(ROWS, WIDTH, dtype=torch.bool)
    decided_BT[torch.arange(ROWS), lengths_B - 1] = True
    rewards = (torch.randint(-16, 17, (ROWS,), generator=generator) / 8).tolist()
    rewards[GROUP_SIZE : 2 * GROUP_SIZE] = [rewards[GROUP_SIZE]] * GROUP_SIZE
    for row in torch.randperm(ROWS, generator=generator)[:ungraded].tolist():
        rewards[row] = None
    return Case(
        logprobs_BT=old_BT.clone() if on_policy else old_BT + spread * (normal() + drift_B1),
        old_BT=old_BT,
        reference_BT=old_BT + 0.5 * normal(),
        sampler_BT=old_BT + 0.5 * normal(),
        mask_BT=(torch.arange(WIDTH) < lengths_B[:, None]) & decided_BT,
        lengths_B=lengths_B,
        finished_B=finished_B,
        rewards=rewards,
    )


def collated(case: Case) -> Batch:
    """The case as covey's recipes would hand it over, in float64."""
    rollouts = [
        Rollout(
            context=row,
            actions=[0] * length,
            behavior_logprobs=[0.0] * length,
            end=EndReason.STOP if case.finished_B[row] else EndReason.LENGTH,
            reward=case.rewards[row],
        )
        for row, length in enumerate(case.lengths_B.tolist())
    ]
    starts = range(0, ROWS, GROUP_SIZE)
    batch = collate([Group(Start(i, ""), rollouts[first : first + GROUP_SIZE]) for i, first in enumerate(starts)])
    return replace(batch, mask_BT=case.mask_BT, behavior_logprobs_BT=torch.where(case.mask_BT, case.sampler_BT, 0.0))


def annotated(
    case: Case, algorithm: Algorithm, *, on_policy: bool, mask_truncated: bool = False, every_row_counts: bool = True
) -> Batch:
    """The batch that the loss reads, with weights in float64.

    `every_row_counts`: rollouts that were masked as a whole stay in the denominator, as in TRL; covey leaves them out.
    """
    batch = collated(case)
    counted_BT = batch.mask_BT & batch.valid_B[:, None]
    if mask_truncated:
        counted_BT = counted_BT & ~batch.truncated_B[:, None]
    counts = count(counted_BT)
    if every_row_counts:
        counts = Counts(rollouts=len(batch), decisions=counts.decisions)
    advantages_BT, _ = algorithm.advantage(batch)
    return replace(
        batch,
        mask_BT=counted_BT,
        advantages_BT=torch.where(counted_BT, advantages_BT, 0.0),
        loss_weights_BT=algorithm.aggregation(counted_BT, counts),
        reference_logprobs_BT=case.reference_BT,
        proximal_logprobs_BT=None if on_policy else case.old_BT,
    )


def losses_of(
    algorithm: Algorithm, batch: Batch, logprobs_BT: Tensor, microbatches: list[Tensor], kl_coefficient: float
) -> list[Tensor]:
    """covey's loss of every microbatch, given as rows, with its gradient added to that of `logprobs_BT`."""
    losses = []
    for rows in microbatches:
        part = batch.select(rows)
        current_BT = logprobs_BT[rows][:, : part.mask_BT.shape[1]]
        terms = algorithm.loss(PolicyOutput(current_BT, torch.zeros_like(current_BT)), part, kl_coefficient)
        terms.loss.backward()
        losses.append(terms.loss.detach())
    return losses
