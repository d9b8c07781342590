"""The loop of every training, and the step of a policy: all differences are in `Components`."""

from collections.abc import Callable

from covey.config import RunError
from covey.data import StepRecord
from covey.runtime.distributed import check_agreement
from covey.train.collect import GroupSource, StepGroups
from covey.train.metrics import Clock
from covey.train.prepare import prepare_rows
from covey.train.record import step_metrics
from covey.train.replay import joined
from covey.train.state import (
    Components,
    Limits,
    LoopConfig,
    Progress,
    Trainable,
    checksums_of,
    save_checkpoint,
    saved_if_lost,
)
from covey.train.update import update

SKIPPED_STEPS_LIMIT = 5  # optimizer steps in a row with a gradient that is not finite: training has diverged


def train(run: Components, config: LoopConfig, progress: Progress, *, should_stop: Callable[[], bool]) -> None:
    """`repeat` with the step of a policy."""
    repeat(lambda: train_step(run, config, progress), run, config, progress, should_stop)


def repeat(
    step: Callable[[], StepRecord], run: Trainable, limits: Limits, progress: Progress, should_stop: Callable[[], bool]
) -> None:
    """Repeat a step until `limits.is_done` or `should_stop()`; in both cases, write a checkpoint of the last step.

    Raises:
        RunError: after SKIPPED_STEPS_LIMIT steps in a row whose gradients were not finite.
        SamplerLost: if no sampler is left; a checkpoint of the last complete step is written.
    """
    saved = progress.step
    while not limits.is_done(progress) and not should_stop():
        with saved_if_lost(run, progress):
            record = step()
        record.metrics.update(run.evaluate(progress.step))
        limits.count_evaluation(progress, record.metrics)
        progress.seconds = limits.pace.after(progress.step, record.metrics, run.team)
        for observer in run.observers:
            observer.record(record)
        if progress.skipped_in_a_row >= SKIPPED_STEPS_LIMIT:
            save_checkpoint(run, progress)
            raise RunError(
                f"{SKIPPED_STEPS_LIMIT} updates in a row had a gradient that is not finite: lower learning_rate; the "
                "rollouts that led there are in the run folder, the weights before them in its last checkpoint"
            )
        if limits.saves_checkpoint(progress):
            save_checkpoint(run, progress)
            saved = progress.step
    if saved != progress.step:
        save_checkpoint(run, progress)


def train_step(run: Components, config: LoopConfig, progress: Progress) -> StepRecord:
    """One step: draw, sample, grade, prepare, update, refresh. Advances `progress`; returns the record of the step."""
    step, seed, clock = progress.step + 1, config.seed, Clock()
    collected = collect(run, config, progress, clock)
    replayed = run.replay.draw(step)
    with clock.measure("time/prepare"):
        prepared = prepare_rows(
            joined(collected.groups, replayed.groups), run.policy, run.algorithm,
            reference=run.reference, critics=run.critics, kl_coefficient=run.kl_coefficient.at(step),
            optimizer_steps=run.learners[0].plan.optimizer_steps(step), mask_truncated=config.mask_truncated,
            seed=seed, step=step, team=run.team,
        )  # fmt: skip
    with clock.measure("time/update"):
        updated = update(run.learners, prepared.batch(), seed=seed, step=step, measure=clock.measure, team=run.team)
    with clock.measure("time/refresh"):
        run.sampler.refresh(progress.version + 1)
        run.reference_updater.after(step)
    with clock.measure("time/record"):
        credits = run.recorder.credits(collected, prepared.of_step())
    run.replay.after(step, collected.groups, prepared)
    chosen = run.selection.after(step, collected.all_groups) | replayed.metrics
    metrics = step_metrics(collected, prepared.metrics | chosen, updated, clock)
    check_agreement(collected.all_groups, updated | checksums_of(run), run.team, f"step {step}")
    progress.advance(collected.all_groups, metrics)
    run.adapt(step, metrics, sum(len(group.rollouts) for group in collected.all_groups))
    return StepRecord(step, metrics, collected.all_groups, credits)


def collect(run: Components, config: LoopConfig, progress: Progress, clock: Clock) -> StepGroups:
    """The graded groups of the next step, collected by `run.collector`."""
    step = progress.step + 1
    source = GroupSource(
        run.task, run.sampler, run.grader, run.algorithm, config.seed, step, progress.starts, clock.measure, run.team,
        run.weights, run.selection,
    )  # fmt: skip
    return run.collector.collect(source, config.starts_per_step, config.group_size(step))
