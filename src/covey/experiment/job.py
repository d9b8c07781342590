"""The life of a training in its run folder: of a policy, of `covey sft` and of `covey reward-model train`.

A `Job` begins the folder or resumes it, refuses changed inputs, trains until an end, a stop or a fault, and leaves the
result with the advice for the user. What is trained comes from a builder (`covey.experiment.build.ExperimentBuilder`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from covey.config import ConfigError, MachineError, RunError, SamplerLost
from covey.config.fields import command
from covey.config.files import faults_of, machine_error
from covey.config.recipe import config_to_dict, write_config
from covey.data import Observer, Team
from covey.experiment import advice
from covey.experiment.advice import Config, Launch
from covey.experiment.build import Experiment, ExperimentBuilder
from covey.experiment.observers import OwnObservers
from covey.experiment.outcome import leave_stopped, summarise
from covey.experiment.resuming import (
    Origin,
    keep_best,
    new_origin,
    read_beginning,
    refuse_changed_inputs,
    restore_checkpoint,
)
from covey.runtime.device import differences
from covey.runtime.distributed import asked_any, exchange_json
from covey.runtime.interrupts import say_last_words, set_last_words, stop_requests
from covey.runtime.variables import own_rank
from covey.tracking.console import Display
from covey.tracking.diagnosis import Diagnosis
from covey.tracking.output import outlasting_output, plain_console
from covey.tracking.repeated_steps import RepeatedSteps
from covey.tracking.run_folder import ORIGIN_FILE, holds_run, resuming_command, write_atomically, write_folders
from covey.tracking.run_result import RunResult
from covey.tracking.run_store import CONFIG_FILE, RunStore
from covey.tracking.trackers import Trackers, open_trackers
from covey.train.state import Progress


@dataclass(frozen=True)
class Job:
    """One training in its run folder.

    Args:
        builder: builds what is trained.
        store: the run folder.
        launch: the command or call that began the run.
        inputs: name -> checksum of the files that it reads.
        observers: of the user's own.
        origin: the record of the run's beginning; None: it begins now, or the record is lost.
        notes: for the user, before the training.
        resuming: the folder has a run already.
    """

    builder: ExperimentBuilder
    store: RunStore
    launch: Launch
    inputs: dict[str, str]
    observers: Sequence[Observer] = ()
    origin: Origin | None = None
    notes: Sequence[str] = ()
    resuming: bool = False

    def run(self) -> RunResult | None:
        """Train to the end; None if the training was stopped.

        Raises:
            RunError: if training cannot continue, or an observer raised an exception.
        """
        builder = self.builder
        config = builder.config
        display = Display(
            config.steps,
            builder.show_rollouts_every,
            title=f"covey: {self.launch.title}",
            wording=builder.wording,
            console=plain_console(quiet=True) if own_rank() else None,
            diagnosis=Diagnosis(config_to_dict(config)),
        )
        display.note(f"{builder.describe()}; everything goes to {self.store.run_dir}")
        for line in (*builder.notes, *self.notes):
            display.note(line)
        set_last_words(lambda: f"interrupted. {self._how_to_continue()}")
        try:
            with outlasting_output(), _trackers(config, self.store, self.launch, display) as trackers:
                return self._train(display, trackers)
        except SamplerLost as error:
            raise RunError(f"{error}. {self._how_to_continue()}") from error
        except KeyboardInterrupt:
            say_last_words()
            raise

    def _train(self, display: Display, trackers: Trackers) -> RunResult | None:
        store, builder = self.store, self.builder
        experiment = builder.build(store, display)
        parts, settings, own = experiment.parts, experiment.settings, OwnObservers(self.observers)
        parts = replace(parts, observers=(*parts.observers, trackers))
        if not parts.team.rank:
            parts = replace(parts, observers=(*parts.observers, own))
        with display:
            progress, team = Progress(), parts.team
            parts.begin_at(progress)
            origin = self.origin or self._begin(experiment)
            if self.resuming:
                for line in differences(origin["environment"], experiment.machine):
                    display.note(f"resuming in a different environment, so results may not be bitwise equal: {line}")
                again = advice.start_again(self.launch, builder.config, store.run_dir)
                progress = restore_checkpoint(
                    parts, store, display, settings.checkpoint_every, again, rollouts=builder.has_rollouts
                )
                if builder.has_rollouts:
                    repeated = RepeatedSteps(store.removed, store.rollouts_path, display.note)
                    parts = replace(parts, observers=(*parts.observers, repeated))
            trackers.begin(builder.tracked(origin["before"]), progress.step)
            with stop_requests(display.note) as stopped:
                should_stop = partial(asked_any, team, lambda: stopped() or own.failed)
                experiment.loop(parts, settings, progress, should_stop=should_stop)
                if should_stop() or not settings.is_done(progress):
                    if progress.step:
                        leave_stopped(builder, experiment, store, progress, origin)
                    then = self._how_to_continue()
                    own.raise_fault(then)
                    display.note(f"stopped after step {progress.step}. {then}")
                    return None
            ended_early = settings.ends_early(progress)
            if ended_early:
                display.note(
                    f"training ends early after step {progress.step}: the held-out {builder.score_name} was best after "
                    f"step {progress.best_step} ({progress.best_score:g}), and not better in "
                    f"{progress.evaluations_since_best} evaluations since"
                )
            after = experiment.measure("after")
            last = builder.tracked(after)
            settings.count_evaluation(progress, last)
            keep_best(parts, progress)
        save = experiment.collect()
        if team.rank:
            return RunResult(exchange_json(team, None)[0])
        write_folders(store.run_dir, save)
        summary = RunResult(summarise(builder, store, progress, origin, after) | experiment.facts())
        store.write_summary(summary)
        exchange_json(team, summary)
        trackers.finish(summary, last)
        builder.draw(store)
        finished = advice.Finished(self.launch, builder.config, str(store.run_dir), builder.drawable(), ended_early)
        builder.show(display, summary, finished)
        return summary

    def _begin(self, experiment: Experiment) -> Origin:
        """Record the beginning of a run; the weights are the initial ones."""
        before = experiment.measure("before")
        origin = new_origin(self.launch, self.builder.config, self.inputs, experiment.machine, before)
        write_atomically(self.store.run_dir / ORIGIN_FILE, json.dumps(origin, indent=2).encode())
        return origin

    def _how_to_continue(self) -> str:
        if holds_run(self.store.run_dir):
            return f"Go on with: {advice.go_on(self.launch, self.store.run_dir)}"
        return f"Start again with: {advice.start(self.launch, self.builder.config, {}, keep_folder=True)}"


def _trackers(config: Config, store: RunStore, launch: Launch, display: Display) -> Trackers:
    """The trackers of a run, all on rank 0."""
    return open_trackers(replace(config, trackers=()) if own_rank() else config, store, launch.title, display.note)


@contextmanager
def open_store(team: Team, run_dir: str | Path | Callable[[], Path], *, resume: bool = False) -> Iterator[RunStore]:
    """Context manager: the run folder on rank 0, on every other rank a temporary folder, because only rank 0 writes.

    Args:
        run_dir: the folder, or a function that creates it, which only rank 0 calls.
        resume: it is that of a run.
    """
    if not team.rank:
        with RunStore(run_dir() if callable(run_dir) else run_dir, resume=resume) as store:
            exchange_json(team, str(store.run_dir.absolute()))
            yield store
        return
    shared = Path(exchange_json(team, None)[0])
    with TemporaryDirectory() as folder, RunStore(Path(folder) / "run", copy_of=shared) as store:
        yield store


@contextmanager
def begun(team: Team, run_dir: str | Path | Callable[[], Path], config: Config, launch: Launch) -> Iterator[RunStore]:
    """Context manager: the new folder of a run, with its config."""
    with open_store(team, run_dir) as store, faults_of_run(store, launch, config):
        with faults_of(store.run_dir / CONFIG_FILE):
            write_config(replace(config, run_dir=str(store.run_dir)), store.run_dir / CONFIG_FILE)
        yield store


@contextmanager
def faults_of_run(store: RunStore, launch: Launch, config: Config | None = None) -> Iterator[None]:
    """Context manager that adds the command that continues the run to a fault of the machine.

    Args:
        store: the run folder.
        launch: the command or call that began the run.
        config: of a run that begins.
    """
    try:
        try:
            yield
        except Exception:
            store.check()  # a missing folder is the cause of any other fault
            raise
        store.check()
    except Exception as error:
        fault = machine_error(error)
        if fault is None:
            raise
        then = "start the run again"
        with suppress(OSError):
            if store.began or holds_run(store.run_dir):
                then = f"go on with: {advice.go_on(launch, store.run_dir)}"
            elif config is not None:
                then = f"start again with: {advice.start(launch, config, {}, keep_folder=True)}"
        raise MachineError(f"{fault}; then {then}") from error


@dataclass(frozen=True)
class Resumed:
    """A run that is resumed, as its folder records it."""

    store: RunStore
    launch: Launch
    origin: Origin | None  # None: lost
    config: Config
    notes: Sequence[str]  # for the user

    def refuse_changed(self, inputs: dict[str, str]) -> None:
        """Refuse files that have changed since the run began.

        Raises:
            ConfigError: with the first one.
        """
        refuse_changed_inputs(self.origin, inputs, self.config, self.store.shared_dir)


@contextmanager
def resumed(team: Team, run_dir: str | Path, kind: str) -> Iterator[Resumed]:
    """Context manager: the folder of a run that is resumed.

    Args:
        team: the ranks.
        run_dir: the folder.
        kind: the words of the command that resumes such a run, "train", "sft" or "reward-model train".

    Raises:
        ConfigError: if it has no run of this kind, or its settings have changed.
    """
    with open_store(team, run_dir, resume=True) as store:
        launch = advice.read_launch(store.shared_dir) or Launch(str(store.shared_dir / CONFIG_FILE))
        with faults_of_run(store, launch):
            origin, config, notes = read_beginning(store.shared_dir)
            own = resuming_command(store.shared_dir)
            if own != kind:
                raise ConfigError(
                    f"{run_dir} is a run of covey {own}: continue it with {command(*own.split(), '--resume', run_dir)}"
                )
            yield Resumed(store, launch, origin, config, notes)
