"""The training loop. It knows neither language models nor environments: what varies is handed to it in `Components`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from covey.algorithms import Algorithm
from covey.config import RunError
from covey.core.schedules import Schedule
from covey.data import Checkpoints, Critic, Grader, Group, Observer, Policy, ReferenceUpdater, Sampler, Task, collate
from covey.runtime.device import peak_memory_bytes
from covey.runtime.optimizer import MasterAdamW
from covey.runtime.timer import Clock
from covey.train.collect import CollectConfig, gather
from covey.train.prepare import prepare_batch
from covey.train.update import Learner, StepCoefficients, UpdatePlan, update

# A single bad batch is skipped; a run whose steps are all bad has broken.
SKIPPED_STEPS_LIMIT = 5


@dataclass(frozen=True)
class Components:
    """What a run is made of."""

    task: Task
    sampler: Sampler
    grader: Grader
    policy: Policy
    reference: Policy | None
    algorithm: Algorithm
    optimizer: MasterAdamW
    observers: Sequence[Observer]
    checkpoints: Checkpoints
    evaluate: Callable[[int], dict[str, float]]  # held-out metrics after a step; empty where none is due
    critic: Critic | None = None  # where the algorithm has a value loss
    critic_optimizer: MasterAdamW | None = None
    reference_updater: ReferenceUpdater | None = None  # of the reference, where it follows the policy


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
    gathering: CollectConfig = field(default_factory=CollectConfig)
    decision_budget: int = 0  # training also ends once so many were sampled; 0 is no limit

    def is_done(self, progress: Progress) -> bool:
        """Whether a run has come to its end."""
        spent = bool(self.decision_budget) and progress.decisions >= self.decision_budget
        return spent or progress.step >= self.steps


@dataclass
class Progress:
    """How far a run has come; with the weights and the optimizer's state, all that a resumed run needs."""

    step: int = 0
    version: int = 0  # of the weights: one more with every update
    decisions: int = 0  # sampled so far
    starts: int = 0  # drawn so far
    skipped_in_a_row: int = 0
    kl_coefficient: float | None = None  # where a controller has set it; None: the schedule does


def train(parts: Components, settings: LoopConfig, progress: Progress, *, should_stop: Callable[[], bool]) -> None:
    """Train until `settings.is_done` or until `should_stop()`; either way a checkpoint of the last step is written.

    Raises:
        RunError: after five optimizer steps in a row with a non-finite gradient.
    """
    saved = progress.step
    while not settings.is_done(progress) and not should_stop():
        metrics, groups = train_step(parts, settings, progress)
        metrics |= parts.evaluate(progress.step)
        for observer in parts.observers:
            observer.record(progress.step, metrics, groups)
        if progress.skipped_in_a_row >= SKIPPED_STEPS_LIMIT:
            save_checkpoint(parts, progress)
            raise RunError(
                f"{SKIPPED_STEPS_LIMIT} updates in a row had a gradient that is not finite: lower learning_rate; the "
                "rollouts that led there are in the run folder, the weights before them in its last checkpoint"
            )
        if progress.step % settings.checkpoint_every == 0:
            save_checkpoint(parts, progress)
            saved = progress.step
    if saved != progress.step:
        save_checkpoint(parts, progress)


def train_step(parts: Components, settings: LoopConfig, progress: Progress) -> tuple[dict[str, float], list[Group]]:
    """One step: draw, sample, grade, annotate, update, refresh. Advances `progress`; returns metrics and rollouts."""
    step = progress.step + 1
    learner = Learner(parts.policy, parts.optimizer, parts.critic, parts.critic_optimizer)
    sizes = StepCoefficients(
        learning_rate=settings.learning_rate(step),
        critic_learning_rate=(settings.critic_learning_rate or settings.learning_rate)(step),
        kl_coefficient=_kl_coefficient(parts, progress, step),
    )
    clock = Clock()

    gathered = gather(parts, settings, step, progress.starts, clock.measure)
    groups = gathered.all_groups
    metrics = describe(groups) | describe_rewards(gathered.unselected) | gathered.metrics
    with clock.measure("time/annotate"):
        batch, found = prepare_batch(
            collate(gathered.groups),
            parts.policy,
            parts.reference,
            parts.algorithm,
            critic=parts.critic,
            kl_coefficient=sizes.kl_coefficient,
            optimizer_steps=settings.plan.policy_epochs(step) * settings.plan.minibatches,
            mask_truncated=settings.mask_truncated,
        )
    with clock.measure("time/update"):
        learned = update(
            learner, parts.algorithm, batch, settings.plan, sizes, seed=settings.seed, step=step, measure=clock.measure
        )
    with clock.measure("time/refresh"):
        parts.sampler.refresh(progress.version + 1)
        if parts.reference_updater is not None and step % settings.follow_every == 0:
            parts.reference_updater.follow()

    progress.step = step
    progress.version += 1
    progress.starts += len(groups)
    progress.decisions += int(metrics["decisions/sampled"])
    bad = bool(learned["update/skipped_steps"]) and not learned["update/optimizer_steps"]
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if bad else 0
    metrics |= (
        gathered.shares_of_all(found)
        | learned
        | {"learning_rate": sizes.learning_rate, "kl_coefficient": sizes.kl_coefficient}
    )
    metrics |= clock.seconds | {
        "time/step": clock.total(),
        "decisions_per_second": metrics["decisions/sampled"] / clock.total(),
        "memory/peak_bytes": float(peak_memory_bytes()),
    }
    _control_kl(parts, progress, metrics, sum(len(group.rollouts) for group in groups))
    return metrics, groups


def _kl_coefficient(parts: Components, progress: Progress, step: int) -> float:
    """What the controller has set, or what the schedule says as long as it has not."""
    return parts.algorithm.kl.coefficient(step) if progress.kl_coefficient is None else progress.kl_coefficient


def _control_kl(parts: Components, progress: Progress, metrics: dict[str, float], rollouts: int) -> None:
    """Set the KL coefficient of the next step, where there is a controller and a KL was measured."""
    kl = parts.algorithm.kl
    measured = metrics.get("kl/behavior" if kl.to_behavior else "kl", math.nan)
    if kl.controller is not None and not math.isnan(measured):
        progress.kl_coefficient = kl.controller.after(progress.step, metrics["kl_coefficient"], measured, rollouts)


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of freshly graded rollouts: rewards, lengths, ends."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.actions) for rollout in rollouts]
    steps = [len(rollout.step_ends) for rollout in rollouts if rollout.step_ends is not None]
    logged: dict[str, list[float]] = {}
    for group in groups:
        for name, values in group.logged.items():
            logged.setdefault(f"reward/{name}", []).extend(values)
    return describe_rewards(groups) | {
        **{name: fmean(values) for name, values in logged.items()},
        **({"length/steps": fmean(steps)} if steps else {}),
        "groups/failed_rollouts": float(sum(rollout.reward is None for rollout in rollouts)),
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated_fraction": fmean(rollout.end.is_limit for rollout in rollouts),
        "decisions/sampled": float(sum(lengths)),
    }


def describe_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """What rollouts earned on average. Those whose grading failed count in no mean."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    metrics = {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)} if rewards else {}
    if scores:
        metrics["score/mean"] = fmean(scores)
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            if value is not None:
                parts.setdefault(f"reward/{name}", []).append(value)
    return metrics | {name: fmean(values) for name, values in parts.items()}


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
