"""The training loop. It knows neither language models nor environments: what varies is handed to it in `Components`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from covey.config import RunError
from covey.data import Group, collate
from covey.runtime.device import peak_memory_bytes
from covey.runtime.timer import Clock, Measure
from covey.train.collect import GroupSource, StepGroups, group_sizes
from covey.train.metrics import describe, describe_rewards
from covey.train.prepare import prepare_batch
from covey.train.state import Components, LoopConfig, Progress, save_checkpoint
from covey.train.update import Learner, StepCoefficients, update

# A single bad batch is skipped; a run whose steps are all bad has broken.
SKIPPED_STEPS_LIMIT = 5


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
    """One step: draw, sample, grade, prepare, update, refresh. Advances `progress`; returns metrics and rollouts."""
    step = progress.step + 1
    learner = Learner(parts.policy, parts.optimizer, parts.critic, parts.critic_optimizer)
    sizes = StepCoefficients(
        learning_rate=settings.learning_rate(step),
        critic_learning_rate=(settings.critic_learning_rate or settings.learning_rate)(step),
        kl_coefficient=_kl_coefficient(parts, progress, step),
    )
    clock = Clock()

    collected = collect(parts, settings, step, progress.starts, clock.measure)
    groups = collected.all_groups
    metrics = describe(groups) | describe_rewards(collected.unselected) | collected.metrics
    with clock.measure("time/prepare"):
        batch, found = prepare_batch(
            collate(collected.groups),
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
        collected.fractions_of_all(found)
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


def collect(parts: Components, settings: LoopConfig, step: int, drawn: int, measure: Measure) -> StepGroups:
    """Graded groups of one step, collected as `settings.collector` does; `drawn` starts were drawn before."""
    source = GroupSource(parts.task, parts.sampler, parts.grader, parts.algorithm, settings.seed, step, drawn, measure)
    found = settings.collector.collect(source, settings.starts_per_step, settings.group_size_at(step))
    if settings.final_group_size is None:
        return found
    return replace(found, metrics=group_sizes(found.groups) | found.metrics)


def _kl_coefficient(parts: Components, progress: Progress, step: int) -> float:
    """The coefficient that the controller has set, else that of the schedule."""
    return parts.algorithm.kl.coefficient(step) if progress.kl_coefficient is None else progress.kl_coefficient


def _control_kl(parts: Components, progress: Progress, metrics: dict[str, float], rollouts: int) -> None:
    """Set the KL coefficient of the next step, if there is a controller and a KL was measured."""
    kl = parts.algorithm.kl
    measured = metrics.get("kl/behavior" if kl.to_behavior else "kl", math.nan)
    if kl.controller is not None and not math.isnan(measured):
        progress.kl_coefficient = kl.controller.after(progress.step, metrics["kl_coefficient"], measured, rollouts)
