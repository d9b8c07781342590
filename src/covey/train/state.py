"""The components and settings of a run, its progress, and both in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.algorithms import Algorithm
from covey.core.schedules import Schedule
from covey.data import Checkpoints, Critic, Grader, Observer, Policy, ReferenceUpdater, Sampler, Task
from covey.runtime.optimizer import MasterAdamW
from covey.train.collect import Collector, FixedGroups
from covey.train.update import UpdatePlan


@dataclass(frozen=True)
class Components:
    """The components of a run."""

    task: Task
    sampler: Sampler
    grader: Grader
    policy: Policy
    reference: Policy | None
    algorithm: Algorithm
    optimizer: MasterAdamW
    observers: Sequence[Observer]
    checkpoints: Checkpoints
    evaluate: Callable[[int], dict[str, float]]  # held-out metrics after a step; empty if none is due
    critic: Critic | None = None  # if the algorithm has a value loss
    critic_optimizer: MasterAdamW | None = None
    reference_updater: ReferenceUpdater | None = None  # of the reference, if it follows the policy


@dataclass(frozen=True)
class LoopConfig:
    """The numbers of a run that the loop itself needs."""

    steps: int
    seed: int
    starts_per_step: int
    group_size: int
    plan: UpdatePlan
    learning_rate: Schedule
    critic_learning_rate: Schedule | None = None  # None: the policy's
    mask_truncated: bool = False
    checkpoint_every: int = 20
    follow_every: int = 0  # steps after which the reference follows the policy; 0 is never
    collector: Collector = field(default_factory=FixedGroups)
    final_group_size: int | None = None  # of the last step; None: the group size stays
    decision_budget: int = 0  # training also ends once so many were sampled; 0 is no limit

    def group_size_at(self, step: int) -> int:
        """first + (last - first) (step - 1) / (steps - 1), rounded: first at step 1, last at the last step."""
        first, last = self.group_size, self.group_size if self.final_group_size is None else self.final_group_size
        return first + round((last - first) * (step - 1) / max(self.steps - 1, 1))

    def is_done(self, progress: Progress) -> bool:
        """Whether a run has come to its end."""
        spent = bool(self.decision_budget) and progress.decisions >= self.decision_budget
        return spent or progress.step >= self.steps


@dataclass
class Progress:
    """Progress of a run; with the weights and the optimizer's state, all that a resumed run needs."""

    step: int = 0
    version: int = 0  # of the weights: one more with every update
    decisions: int = 0  # sampled so far
    starts: int = 0  # drawn so far
    skipped_in_a_row: int = 0
    kl_coefficient: float | None = None  # set by a controller; None: the schedule does


def save_checkpoint(parts: Components, progress: Progress) -> None:
    """Everything that a run needs to go on from here, bit for bit."""
    state = {
        "progress": vars(progress),
        "optimizer": parts.optimizer.state_dict(),
        "sampler": parts.sampler.state_dict(),
    }
    if parts.critic_optimizer is not None:
        state["critic_optimizer"] = parts.critic_optimizer.state_dict()
    if parts.reference_updater is not None:
        state["reference"] = parts.reference_updater.state_dict()
    parts.checkpoints.save(progress.step, state)


def load_checkpoint(parts: Components, state: dict[str, Any]) -> Progress:
    """Put a saved state back into the parts; returns how far it had come."""
    progress = Progress(**state["progress"])
    parts.optimizer.load_state_dict(state["optimizer"])
    if parts.critic_optimizer is not None:
        parts.critic_optimizer.load_state_dict(state["critic_optimizer"])
    if parts.reference_updater is not None:
        parts.reference_updater.load_state_dict(state["reference"])
    parts.sampler.load_state_dict(state["sampler"])
    parts.sampler.refresh(progress.version)
    return progress
