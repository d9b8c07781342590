"""Trains, resumes and checks a run from its config. The commands and scripts call the same functions.

The parts of each kind of run are in `covey.experiment.llm` and `covey.experiment.control`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from covey.algorithms import Algorithm
from covey.config import ConfigError, ControlConfig, MachineError, RunConfig, RunError, SamplerLost
from covey.config.conversation import ConversationConfig, with_conversation
from covey.config.faults import faults_of, machine_error
from covey.config.fields import command
from covey.config.inputs import input_checksums
from covey.config.recipe_writing import config_to_dict, write_config
from covey.config.rules import validate
from covey.config.sft import SFT_ALGORITHM
from covey.data import Observer, Task, Team
from covey.experiment import advice
from covey.experiment.advice import Launch
from covey.experiment.build import ExperimentBuilder, Reward
from covey.experiment.observers import Observers, OwnObservers, check_observers
from covey.experiment.outcome import draw, leave_stopped, summarise
from covey.experiment.resuming import (
    Origin,
    keep_best,
    new_origin,
    read_beginning,
    refuse_changed_inputs,
    restore_checkpoint,
    same_arguments,
    same_conversation,
)
from covey.runtime.device import differences
from covey.runtime.distributed import ALONE, asked_any, exchange_json, joined_ranks, team_of
from covey.runtime.interrupts import say_last_words, set_last_words, stop_requests
from covey.runtime.ranks import check_ranks, own_rank
from covey.tracking.console import Display
from covey.tracking.diagnosis import Diagnosis
from covey.tracking.notebook import ignore_missing_widgets
from covey.tracking.output import outlasting_output, plain_console
from covey.tracking.repeated_steps import RepeatedSteps
from covey.tracking.run_folder import ORIGIN_FILE, claim_run_dir, holds_run, write_atomically, write_folders
from covey.tracking.run_result import RunResult
from covey.tracking.run_store import CONFIG_FILE, RunStore
from covey.tracking.trackers import Trackers, open_trackers
from covey.train.iterate import iterate
from covey.train.loop import train
from covey.train.state import Progress

Summary = RunResult
TaskSource = Task | Sequence[Mapping[str, Any]] | str | Path  # see covey.llm.tasks.task_of


def run(
    config: RunConfig | ControlConfig,
    *,
    task: TaskSource | None = None,
    rewards: Reward | Sequence[Reward] = (),
    conversation: ConversationConfig | None = None,
    algorithm: Algorithm | None = None,
    observers: Observers = (),
    recipe_name: str = advice.PYTHON_NAME,
    launch: Launch | None = None,
) -> Summary | None:
    """Train a policy and evaluate it before and after.

    Args:
        config: config of the run; an empty `run_dir` means a numbered folder.
        task: for a language model, instead of the config's: prompts (dicts with a `prompt` and any other columns), the
            path of a data file, a task's config, or an object with the methods of `covey.data.Task`.
        rewards: for a language model, instead of the config's: functions, built-in rewards by name, file.py:function.
        conversation: for a language model, instead of the config's: a `covey.Conversation`, whose environment may be a
            class of the program.
        algorithm: instead of the config's and its table [loss]: a `covey.algorithms.Algorithm`, such as a preset with
            an advantage or a loss of your own. The config's name of an algorithm still sets the rules about groups and
            the critic, and the defaults of sampling.
        observers: objects with the method `record(step)`, called with the `covey.StepRecord` of every step after it is
            recorded; of several ranks by rank 0 alone. If one raises an exception, the run ends after that step.
        recipe_name: first part of the run folder's name.
        launch: the command that starts the run, for the advice at its end; None advises calls of this function.

    Returns:
        The content of `summary.json`, which a notebook displays as a table and which draws the run with `figure()`;
        None if Ctrl-C stopped the run between two steps.

    Raises:
        ConfigError: for invalid arguments, before the model is loaded if possible.
        RunError: if training cannot continue, or an observer raised an exception.
        MachineError: for a fault of the machine, such as a full disk; the run can be resumed from its last checkpoint.
    """
    rewards, own = _listed(rewards), check_observers(observers)
    config, environment = with_conversation(config, conversation)
    validate(config, own_task=task is not None, own_rewards=bool(rewards), own_environment=environment is not None)
    check_ranks(config)
    inputs = input_checksums(config, own_task=task is not None, own_rewards=bool(rewards))
    with joined_ranks():
        team = _team(config)
        builder = open_builder(config, task, rewards, team, environment, algorithm)
        try:
            run_dir = config.run_dir or (lambda: claim_run_dir(Path(recipe_name).stem))
            with open_store(team, run_dir) as store, _faults_of_run(store):
                with faults_of(store.run_dir / CONFIG_FILE):
                    write_config(replace(builder.config, run_dir=str(store.run_dir)), store.run_dir / CONFIG_FILE)
                launch = launch or Launch.from_python(recipe_name, task, rewards, own, conversation, algorithm)
                return _execute(builder, store, launch, inputs, own)
        finally:
            builder.close()


def resume(
    run_dir: str | Path,
    *,
    task: TaskSource | None = None,
    rewards: Reward | Sequence[Reward] = (),
    conversation: ConversationConfig | None = None,
    algorithm: Algorithm | None = None,
    observers: Observers = (),
) -> Summary | None:
    """Resume a run that was stopped or killed; its results are those of an uninterrupted run.

    If the run was started with a task, rewards, a conversation, an algorithm or observers of its own in Python, pass
    them again. What they compute is not compared with what they computed before.

    Raises:
        RunError: as `run`.
        ConfigError: if the folder has no run that can be resumed, or its settings, its data or the files of its
            functions have changed since it began.
        MachineError: for a fault of the machine; the run keeps its progress.
    """
    rewards, own = _listed(rewards), check_observers(observers)
    with joined_ranks(), open_store(team_of(0), run_dir, resume=True) as store, _faults_of_run(store):
        origin, config, notes = read_beginning(store.shared_dir)
        if config.algorithm == SFT_ALGORITHM:
            raise ConfigError(
                f"{run_dir} is a supervised training: continue it with {command('sft', '--resume', run_dir)}"
            )
        launch = advice.read_launch(store.shared_dir) or Launch(str(store.shared_dir / CONFIG_FILE))
        same_arguments(launch, run_dir, task, rewards, algorithm)
        config, environment = same_conversation(config, conversation)
        validate(config, own_task=task is not None, own_rewards=bool(rewards), own_environment=environment is not None)
        check_ranks(config)
        inputs = input_checksums(config, own_task=task is not None, own_rewards=bool(rewards))
        refuse_changed_inputs(origin, inputs, config, store.shared_dir)
        team = _team(config)
        builder = open_builder(config, task, rewards, team, environment, algorithm)
        try:
            return _execute(builder, store, launch, inputs, own, origin, notes, resuming=True)
        finally:
            builder.close()


def _listed(rewards: Reward | Sequence[Reward]) -> Sequence[Reward]:
    return tuple(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else (rewards,)


def open_builder(
    config: RunConfig | ControlConfig,
    task: TaskSource | None = None,
    rewards: Sequence[Reward] = (),
    team: Team = ALONE,
    environment: Any = None,
    algorithm: Algorithm | None = None,
) -> ExperimentBuilder:
    """The experiment builder of a config, whose light parts are checked.

    Raises:
        ConfigError: for the first fault.
    """
    ignore_missing_widgets()
    # Imported here, because the libraries of the other kind of run take seconds to load.
    if isinstance(config, RunConfig):
        from covey.experiment.llm import LLMBuilder

        return LLMBuilder(config, task, rewards, team, environment, algorithm)
    if task is not None or rewards:
        raise ConfigError("a run on an environment takes no task and no rewards of its own: the environment has both")
    from covey.experiment.control import ControlBuilder

    return ControlBuilder(config, algorithm)


def _execute(
    builder: ExperimentBuilder,
    store: RunStore,
    launch: Launch,
    inputs: dict[str, str],
    observers: Sequence[Observer] = (),
    origin: Origin | None = None,
    notes: Sequence[str] = (),
    *,
    resuming: bool = False,
) -> Summary | None:
    config = builder.config
    display = Display(
        config.steps,
        config.show_rollouts_every,
        title=f"covey: {launch.title}",
        domain=builder.name,
        score_kind=builder.score_kind,
        console=plain_console(quiet=True) if own_rank() else None,
        diagnosis=Diagnosis(config_to_dict(config)),
    )
    display.note(f"{builder.describe()}; everything goes to {store.run_dir}")
    for line in (*builder.notes, *notes):
        display.note(line)
    set_last_words(lambda: f"interrupted. {_how_to_continue(builder, store.run_dir, launch)}")
    try:
        with outlasting_output(), _trackers(config, store, launch, display) as trackers:
            return _train(builder, store, launch, inputs, observers, display, trackers, origin, resuming=resuming)
    except SamplerLost as error:
        raise RunError(f"{error}. {_how_to_continue(builder, store.run_dir, launch)}") from error
    except KeyboardInterrupt:
        say_last_words()
        raise


def _trackers(config: RunConfig | ControlConfig, store: RunStore, launch: Launch, display: Display) -> Trackers:
    """The trackers of a run, all on rank 0."""
    return open_trackers(replace(config, trackers=()) if own_rank() else config, store, launch.title, display.note)


def _train(
    builder: ExperimentBuilder,
    store: RunStore,
    launch: Launch,
    inputs: dict[str, str],
    observers: Sequence[Observer],
    display: Display,
    trackers: Trackers,
    origin: Origin | None,
    *,
    resuming: bool,
) -> Summary | None:
    experiment = builder.build(store, display)
    parts, settings, own = experiment.parts, experiment.settings, OwnObservers(observers)
    parts = replace(parts, observers=(*parts.observers, trackers))
    if not parts.team.rank:
        parts = replace(parts, observers=(*parts.observers, own))
    with display:
        progress, team = Progress(), parts.team
        parts.sampler.refresh(progress.version)
        if origin is None:  # the weights are the initial ones
            origin = new_origin(launch, builder.config, inputs, experiment.machine, experiment.measure("before"))
            write_atomically(store.run_dir / ORIGIN_FILE, json.dumps(origin, indent=2).encode())
        if resuming:
            for line in differences(origin["environment"], experiment.machine):
                display.note(f"resuming on another footing, so the last bits may differ: {line}")
            progress = restore_checkpoint(parts, store, display, settings.checkpoint_every)
            repeated = RepeatedSteps(store.removed, store.rollouts_path, display.note)
            parts = replace(parts, observers=(*parts.observers, repeated))
        trackers.begin(origin["before"], progress.step)
        with stop_requests(display.note) as stopped:
            loop = iterate if settings.iteration_steps else train
            should_stop = partial(asked_any, team, lambda: stopped() or own.failed)
            loop(parts, settings, progress, should_stop=should_stop)
            if should_stop() or not settings.is_done(progress):
                if progress.step:
                    leave_stopped(builder, experiment, store, progress, origin)
                then = _how_to_continue(builder, store.run_dir, launch)
                own.raise_fault(then)
                display.note(f"stopped after step {progress.step}. {then}")
                return None
        if settings.ends_early(progress):
            display.note(_early_end(progress, builder.score_kind))
        after = experiment.measure("after")
        keep_best(parts, progress, after[0]["score"])
    save = experiment.collect()
    if team.rank:
        return RunResult(exchange_json(team, None)[0])
    write_folders(store.run_dir, save)
    summary = RunResult(summarise(builder, store, progress, origin, after) | experiment.facts())
    store.write_summary(summary)
    exchange_json(team, summary)
    trackers.finish(summary)
    draw(store, iterative=bool(settings.iteration_steps))
    finished = advice.Finished(
        launch, builder.config, str(store.run_dir), builder.drawable(), settings.ends_early(progress)
    )
    display.show_summary(summary, advice.after_training(finished, summary))
    return summary


def _early_end(progress: Progress, score_kind: str) -> str:
    return (
        f"training ends early after step {progress.step}: the held-out {score_kind} was highest after step "
        f"{progress.best_step} ({progress.best_score:g}), and not exceeded in {progress.evaluations_since_best} "
        "evaluations since"
    )


def _how_to_continue(builder: ExperimentBuilder, run_dir: Path, launch: Launch) -> str:
    if holds_run(run_dir):
        return f"Go on with: {advice.go_on(launch, run_dir)}"
    return f"Start again with: {advice.start(launch, builder.config, {}, keep_folder=True)}"


def _team(config: RunConfig | ControlConfig) -> Team:
    if not isinstance(config, RunConfig):
        return ALONE
    team = team_of(config.cluster.shards)
    if config.cluster.weights == "replicate" or team.size == 1:
        return team
    if config.cluster.weights == "auto":
        from covey.experiment.memory_of_ranks import must_shard  # imported here, because transformers takes seconds

        if not must_shard(config, team):
            return team
    return team_of(config.cluster.shards, sharded=True)


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
def _faults_of_run(store: RunStore) -> Iterator[None]:
    """Context manager that adds the command that continues the run to a fault of the machine."""
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
                then = f"go on with: {command('train', '--resume', store.run_dir)}"
        raise MachineError(f"{fault}; then {then}") from error


def check(config: RunConfig | ControlConfig) -> list[str]:
    """Try out the data, the rewards and the model of a recipe, or its environment, without training.

    A model is loaded if it is on this machine and fits into its memory.

    Returns:
        Notes for the user before the run, one line each.

    Raises:
        ConfigError: for the first fault.
    """
    validate(config)
    builder = open_builder(config)
    builder.close()
    if isinstance(config, RunConfig):
        from covey.experiment.backend_report import report_backend
        from covey.experiment.llm import LLMBuilder
        from covey.llm.model.loading import check_model_files

        assert isinstance(builder, LLMBuilder)
        check_model_files(config.model)
        return [*builder.problem.prompt_as_read(builder.kind, builder.config), *builder.notes, report_backend(config)]
    return list(builder.notes)
