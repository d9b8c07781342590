"""The life of a training in its run folder: of a policy, of `covey sft` and of `covey reward-model train`.

A `Job` begins the folder or resumes it, refuses changed inputs, trains until an end, a stop or a fault, and leaves the
result with the advice for the user. What is trained comes from an `ExperimentBuilder`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Protocol

from covey.config import ConfigError, ControlConfig, MachineError, RewardConfig, RunConfig, RunError, SamplerLost
from covey.config.common import last_restart
from covey.config.fields import command
from covey.config.files import MemoryFault, faults_of, machine_error
from covey.config.model_sources import CHECKPOINTS_FOLDER, CONFIG_FILE
from covey.config.recipe import config_to_dict, write_config
from covey.config.sft import RewardModelTraining
from covey.data import Observer, StepRecord, Team
from covey.experiment import advice
from covey.experiment.advice import Config, Finished, Launch
from covey.experiment.resuming import (
    Origin,
    beyond,
    describe_restart,
    elapsed_after,
    keep_best,
    plain_config,
    read_beginning,
    refuse_changed_inputs,
    restore_checkpoint,
)
from covey.runtime.checkpoint import CheckpointFolder, PartOfCheckpoints, ReadCheckpoints
from covey.runtime.device import differences, peak_memory_bytes
from covey.runtime.distributed import ALONE, asked_any, exchange_json, team_of
from covey.runtime.interrupts import say_last_words, set_last_words, stop_requests
from covey.runtime.variables import own_rank
from covey.tracking.console import Display, RunResult, clock
from covey.tracking.curve import draw_curve, draw_iterations
from covey.tracking.diagnosis import Diagnosis, brief, diagnose
from covey.tracking.output import outlasting_output, plain_console
from covey.tracking.run_folder import (
    CURVE_FILE,
    ORIGIN_FILE,
    holds_run,
    resuming_command,
    write_atomically,
    write_folders,
)
from covey.tracking.run_store import RepeatedSteps, RunStore, read_metrics
from covey.tracking.trackers import Trackers, open_trackers
from covey.tracking.wording import Wording, find_wording
from covey.train.loop import train
from covey.train.pace import METRIC
from covey.train.state import Components, Limits, Progress
from covey.train.supervised import SupervisedRun

Evaluation = dict[str, Any]

Observers = Observer | Sequence[Observer]
# A function with TRL's signature, a built-in reward's name, file.py:function, or a RewardConfig.
Reward = Callable[..., Any] | RewardConfig | str


class Loop(Protocol):
    """A loop of a training, such as `covey.train.loop.train`."""

    def __call__(self, run: Any, limits: Any, progress: Progress, /, *, should_stop: Callable[[], bool]) -> None:
        """Train until the end or `should_stop()`."""


@dataclass(frozen=True)
class Experiment:
    """The components of a run, ready for training."""

    parts: Components | SupervisedRun
    settings: Limits
    measure: Callable[[str], list[Evaluation]]  # evaluation on held-out data; the label is for the display
    # Collects the trained weights of all ranks; returns a function that writes them into the run folder.
    collect: Callable[[], Callable[[Path], None]]
    machine: dict[str, Any]  # hardware and versions that affect the bits of a result
    facts: Callable[[], dict[str, Any]]  # additional keys of summary.json for this kind of run
    loop: Loop = train


class ExperimentBuilder:
    """Builds the experiment of one kind of training, and knows how it differs from the others.

    The defaults are for a policy (`LLMBuilder`, `ControlBuilder`); a training on examples is a `SupervisedBuilder`.
    """

    name = "language"  # or "control"
    config: Any  # of the run, as written to its folder
    algorithm: Any  # of a policy
    found: Sequence[str] = ()  # what the user should know of the data or the environments
    has_rollouts = True  # its steps record rollouts

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user before the run, one line each."""
        return self.found

    @property
    def score_kind(self) -> str:
        """Kind of the evaluations' scores: a key of `covey.tracking.wording.SCORE_KINDS`."""
        raise NotImplementedError

    @property
    def score_name(self) -> str:
        """The score whose best value is kept, in words."""
        return self.score_kind

    @property
    def algorithm_name(self) -> str:
        """As in the summary."""
        return str(self.algorithm.name)

    @property
    def wording(self) -> Wording:
        """The texts of the display."""
        return find_wording({"domain": self.name, "score_kind": self.score_kind})

    @property
    def show_rollouts_every(self) -> int:
        """Steps between printed rollouts; 0: never."""
        return int(self.config.show_rollouts_every)

    @property
    def saves_if_stopped(self) -> bool:
        """True if a run that is stopped writes its weights."""
        return bool(self.config.checkpoint.model_if_stopped)

    def describe(self) -> str:
        """A short description of the run."""
        raise NotImplementedError

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Load models or create environments, and build the components."""
        raise NotImplementedError

    def tracked(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """The metrics of an evaluation before or after training."""
        return {"eval/score": evaluations[0]["score"]}

    def results(self, before: Sequence[Evaluation], after: Sequence[Evaluation]) -> dict[str, Any]:
        """The keys of the summary that have the evaluations; `after` is empty for a stopped run."""
        evaluations = [{key: one[key] for key in ("max_new_tokens",) if key in one} | {"before": one} for one in before]
        for evaluation, measured in zip(evaluations, after, strict=False):
            evaluation["after"] = measured
        return {"evaluations": evaluations}

    def draw(self, store: RunStore) -> None:
        """Draw the pictures of a run that has ended or was stopped."""
        with faults_of(store.run_dir / CURVE_FILE):
            draw_curve(store.run_dir)
            if isinstance(self.config, RunConfig) and self.config.iteration.steps:
                draw_iterations(store.run_dir)

    def show(self, display: Display, summary: dict[str, Any], run: Finished) -> None:
        """Show the result of a finished run, with advice."""
        display.show_summary(summary, advice.after_training(run, summary))

    def drawable(self) -> bool:
        """True if an episode can be rendered here."""
        return False

    def close(self) -> None:
        """End the processes that the builder started."""


@dataclass(frozen=True)
class Job:
    """One training in its run folder.

    Args:
        store: the run folder.
        launch: the command or call that began the run.
        config: of the run.
        origin: the record of the run's beginning; None: it begins now, or the record is lost.
        notes: for the user, before the training.
        resuming: the folder has a run already.
        goes_on: the run is finished, and `config` has other limits and the restart of its schedules.
    """

    store: RunStore
    launch: Launch
    config: Config
    origin: Origin | None = None
    notes: Sequence[str] = ()
    resuming: bool = False
    goes_on: bool = False

    def refuse_changed(self, inputs: dict[str, str]) -> None:
        """Refuse files that have changed since the run began.

        Raises:
            ConfigError: with the first one.
        """
        refuse_changed_inputs(self.origin, inputs, self.config, self.store.shared_dir)

    def run(
        self, builder: ExperimentBuilder, inputs: dict[str, str], observers: Sequence[Observer] = ()
    ) -> RunResult | None:
        """Train to the end; None if the training was stopped.

        Args:
            builder: builds what is trained.
            inputs: name -> checksum of the files that it reads.
            observers: of the user's own.

        Raises:
            RunError: if training cannot continue, or an observer raised an exception.
        """
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
                return self._train(builder, inputs, OwnObservers(observers), display, trackers)
        except SamplerLost as error:
            raise RunError(f"{error}. {self._how_to_continue()}") from error
        except KeyboardInterrupt:
            say_last_words()
            raise

    def _train(
        self,
        builder: ExperimentBuilder,
        inputs: dict[str, str],
        own: OwnObservers,
        display: Display,
        trackers: Trackers,
    ) -> RunResult | None:
        store = self.store
        experiment = builder.build(store, display)
        config, parts, settings = builder.config, experiment.parts, experiment.settings
        observers = (trackers,) if parts.team.rank else (trackers, own)
        parts = replace(parts, observers=(*parts.observers, *observers))
        with display:
            progress, team = Progress(), parts.team
            parts.begin_at(progress)
            origin = self.origin or self._begin(experiment, inputs)
            if self.resuming:
                for line in differences(origin["environment"], experiment.machine):
                    display.note(f"resuming in a different environment, so results may not be bitwise equal: {line}")
                if self.goes_on:
                    self._go_on(origin, team)
                again = advice.start_again(self.launch, builder.config, store.run_dir)
                progress = restore_checkpoint(
                    parts, store, display, settings.checkpoint_every, again, rollouts=builder.has_rollouts
                )
                if builder.has_rollouts:
                    repeated = RepeatedSteps(store.removed, store.rollouts_path, display.note)
                    parts = replace(parts, observers=(*parts.observers, repeated))
            self._begin_pace(settings, progress, origin, display, team)
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
            if ended_early := settings.ends_early(progress):
                display.note(_early_end(builder, progress))
            if settings.pace.is_used_up:
                display.note(f"the time budget of {config.time_budget} ends training after step {progress.step}")
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
        self._show(builder, display, summary, ended_early)
        return summary

    def _show(self, builder: ExperimentBuilder, display: Display, summary: RunResult, ended_early: bool) -> None:
        finished = Finished(self.launch, builder.config, str(self.store.run_dir), builder.drawable(), ended_early)
        builder.show(display, summary, finished)

    def _begin_pace(self, settings: Limits, progress: Progress, origin: Origin, display: Display, team: Team) -> None:
        """Begin or continue the time budget, if there is one; every rank calls it."""
        if math.isinf(settings.pace.seconds_left):
            return
        recorded = {step: line[METRIC] for step, line in self.store.removed_metrics.items() if METRIC in line}
        steps = progress.step, last_restart(self.config)
        own = [] if team.rank else elapsed_after(self.store.run_dir, *steps)
        elapsed, restarted = exchange_json(team, own)[0]
        evaluations = 2 * sum(one["seconds"] for one in origin["before"])
        settings.pace.begin(progress.seconds or elapsed, evaluations, recorded, restarted)
        display.seconds_budgeted = lambda: settings.pace.seconds_left
        display.note(f"time left for training in the budget: {clock(settings.pace.seconds_left)}")

    def _begin(self, experiment: Experiment, inputs: dict[str, str]) -> Origin:
        """Record the beginning of a run; the weights are the initial ones."""
        origin = {
            "recipe": self.launch.title,
            "launch": vars(self.launch),
            "config": plain_config(self.config),
            "inputs": inputs,
            "environment": experiment.machine,
            "before": experiment.measure("before"),
        }
        write_atomically(self.store.run_dir / ORIGIN_FILE, json.dumps(origin, indent=2).encode())
        return origin

    def _go_on(self, origin: Origin, team: Team) -> None:
        """Record the new limits of a finished run, which becomes one that was stopped after its last step.

        Every rank calls it. If it is interrupted, the folder has the old limits or the new ones: a config that is
        missing is written again from the record.
        """
        exchange_json(team, None)  # every rank has read the folder
        if team.rank:
            return
        store, path = self.store, self.store.run_dir / CONFIG_FILE
        store.reopen(last_restart(self.config))
        with faults_of(path):
            path.unlink(missing_ok=True)
            record = origin | {"config": plain_config(self.config), "launch": vars(self.launch)}
            write_atomically(store.run_dir / ORIGIN_FILE, json.dumps(record, indent=2).encode())
            write_config(self.config, path)

    def _how_to_continue(self) -> str:
        if holds_run(self.store.run_dir):
            return f"Go on with: {advice.go_on(self.launch, self.store.run_dir)}"
        return f"Start again with: {advice.start(self.launch, self.config, {}, keep_folder=True)}"


def _trackers(config: Config, store: RunStore, launch: Launch, display: Display) -> Trackers:
    """The trackers of a run, all on rank 0."""
    return open_trackers(replace(config, trackers=()) if own_rank() else config, store, launch.title, display.note)


def team_for(config: Config, parameters: int | None = None) -> Team:
    """The ranks that train this config together. Call it within `joined_ranks`.

    Args:
        parameters: of a reward model, the number of its weights.
    """
    if isinstance(config, ControlConfig):
        return ALONE
    cluster = config if isinstance(config, RewardModelTraining) else config.cluster
    team = team_of(cluster.shards)
    quantized = isinstance(config, RunConfig) and config.lora.load_in_4bit  # weights that cannot be divided
    if cluster.weights == "replicate" or quantized or team.size == 1:
        return team
    if cluster.weights == "auto":
        from covey.experiment.plan import must_shard  # imported here, because transformers takes seconds

        if not must_shard(config, team, parameters):
            return team
    return team_of(cluster.shards, sharded=True)


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
def begun(team: Team, run_dir: str | Path | Callable[[], Path], config: Config, launch: Launch) -> Iterator[Job]:
    """Context manager: the training of a new run folder, in which its config is written."""
    with open_store(team, run_dir) as store, faults_of_run(store, launch, config):
        with faults_of(store.run_dir / CONFIG_FILE):
            write_config(replace(config, run_dir=str(store.run_dir)), store.run_dir / CONFIG_FILE)
        yield Job(store, launch, config)


@contextmanager
def faults_of_run(store: RunStore, launch: Launch, config: Config | None = None) -> Iterator[None]:
    """Context manager that adds the command that continues the run to a fault of the machine.

    Args:
        store: the run folder.
        launch: the command or call that began the run.
        config: of the run.
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
        then, where = "start the run again", ""
        with suppress(OSError):
            if store.began or holds_run(store.run_dir):
                then = f"go on with: {advice.go_on(launch, store.run_dir)}"
                where = str(store.run_dir / CONFIG_FILE)
            elif config is not None:
                then = f"start again with: {advice.start(launch, config, {}, keep_folder=True)}"
        if isinstance(fault, MemoryFault):
            fault = advice.less_memory(fault, error, config, where)
        raise MachineError(f"{fault}; then {then}") from error


@contextmanager
def resumed(
    team: Team, run_dir: str | Path, kind: str, limits: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Job]:
    """Context manager: the training of a run folder that is resumed.

    Args:
        team: the ranks.
        run_dir: the folder.
        kind: the words of the command that resumes such a run, "train", "sft" or "reward-model train".
        limits: beyond which a finished run goes on (`covey.experiment.resuming.LIMITS`).

    Raises:
        ConfigError: if it has no run of this kind, its settings have changed, or it cannot go on so.
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
        if limits:
            with faults_of_run(store, launch, config):
                config = beyond(config, origin, limits, store.shared_dir, kind)
            launch = launch.with_fields(limits)
            notes = [*notes, *describe_restart(config)]
        with faults_of_run(store, launch, config):
            yield Job(store, launch, config, origin, notes, resuming=True, goes_on=bool(limits))


def build_checkpoints(
    store: RunStore, keep: int, team: Team = ALONE, *, best: bool = False, in_parts: bool = False
) -> CheckpointFolder:
    """The checkpoints of a run folder, which rank 0 writes; with `in_parts`, ranks that have some rows of the trained
    weights each write theirs. Records of earlier steps are flushed to the disk before.
    """
    path = store.shared_dir / CHECKPOINTS_FOLDER
    if in_parts:
        kind: type[CheckpointFolder] = PartOfCheckpoints if team.rank else CheckpointFolder
        return kind(path, keep, before_save=store.sync, team=team, keep_best=best)
    return (ReadCheckpoints if team.rank else CheckpointFolder)(path, keep, before_save=store.sync, keep_best=best)


def summarise(
    builder: ExperimentBuilder,
    store: RunStore,
    progress: Progress,
    origin: Origin,
    after: Sequence[Evaluation] = (),
) -> dict[str, Any]:
    """The summary of a run; without `after`, that of a run so far, whose evaluations have no "after"."""
    steps = read_metrics(store.run_dir)
    before: list[Evaluation] = origin["before"]
    results = builder.results(before, after)
    sampled = {"decisions_sampled": progress.decisions} if builder.has_rollouts else {}
    best = {"best": {"step": progress.best_step, "score": progress.best_score}} if progress.best_step else {}
    return {
        "domain": builder.name,
        "score_kind": builder.score_kind,
        "run_dir": str(store.run_dir),
        "recipe": origin["recipe"],
        "algorithm": builder.algorithm_name,
        "seed": builder.config.seed,
        "steps": progress.step,
        "seconds": sum(step.get("time/step", 0.0) for step in steps)
        + sum(result["seconds"] for result in (*before, *after)),
        **sampled,
        "peak_memory_bytes": max([peak_memory_bytes(), *(int(step.get("memory/peak_bytes", 0)) for step in steps)]),
        "machine": origin["environment"],
        **results,
        "findings": brief(diagnose(steps, config_to_dict(builder.config), results["evaluations"])),
        **best,
    }


def _early_end(builder: ExperimentBuilder, progress: Progress) -> str:
    return (
        f"training ends early after step {progress.step}: the held-out {builder.score_name} was best after step "
        f"{progress.best_step} ({progress.best_score:g}), and not better in {progress.evaluations_since_best} "
        "evaluations since"
    )


def leave_stopped(
    builder: ExperimentBuilder, experiment: Experiment, store: RunStore, progress: Progress, origin: Origin
) -> None:
    """Write what a run leaves that was stopped after a step: stopped.json, on request its weights, and its picture.

    Every rank calls it. A resumed run removes or replaces these files.
    """
    saves = [experiment.collect()] if builder.saves_if_stopped else []
    if experiment.parts.team.rank or store.finished():
        return
    state = {"state": "stopped", "step": progress.step}
    store.write_stopped(state | summarise(builder, store, progress, origin) | experiment.facts())
    for save in saves:
        write_folders(store.run_dir, save)
    builder.draw(store)


def check_observers(observers: Observers) -> tuple[Observer, ...]:
    """One observer or several as a tuple.

    Raises:
        ConfigError: for an object without the method `record`.
    """
    listed = (observers,) if hasattr(observers, "record") or not isinstance(observers, Sequence) else tuple(observers)
    for one in listed:
        if isinstance(one, type) or not callable(getattr(one, "record", None)):
            kind = f"the class {one.__name__}" if isinstance(one, type) else f"of type {type(one).__name__}"
            raise ConfigError(
                f"observers: one is {kind}: give objects with the method record(step), which gets a covey.StepRecord"
            )
    return listed


class OwnObservers:
    """Calls the observers of the user's own after those of covey; implements `covey.data.Observer`.

    The first exception is kept, and the run ends after the step as if it had been stopped: the step is recorded already
    and a checkpoint follows, so nothing is lost.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._fault: RunError | None = None

    def record(self, step: StepRecord) -> None:
        """Give the step to each observer."""
        for observer in self._observers:
            try:
                observer.record(step)
            except Exception as error:
                name, reason = type(observer).__name__, " ".join(str(error).split())
                self._fault = RunError(
                    f"the observer {name} raised {type(error).__name__}{f' ({reason:.200})' if reason else ''} in step "
                    f"{step.step}, which is recorded and saved"
                )
                self._fault.__cause__ = error
                return

    @property
    def failed(self) -> bool:
        """True if an observer has raised an exception."""
        return self._fault is not None

    def raise_fault(self, how_to_continue: str) -> None:
        """Raise the error of the observer that failed, if one has.

        Args:
            how_to_continue: the end of the message.

        Raises:
            RunError: naming the observer; its exception is the cause.
        """
        if self._fault is not None:
            raise RunError(f"{self._fault}. {how_to_continue}") from self._fault.__cause__
