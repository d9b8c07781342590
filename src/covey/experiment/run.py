"""Trains, resumes and checks a run from its config. The commands and scripts call the same functions.

The parts of each kind of run are in `covey.experiment.llm` and `covey.experiment.control`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from covey.algorithms import Algorithm
from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.conversation import ConversationConfig, with_conversation
from covey.config.inputs import input_checksums, keep_hub_data
from covey.config.rules import validate
from covey.config.sft import RewardModelTraining
from covey.config.tasks import DatasetConfig
from covey.data import Task, Team
from covey.experiment import advice
from covey.experiment.advice import Launch
from covey.experiment.job import ExperimentBuilder, Observers, Reward, begun, check_observers, resumed, team_for
from covey.experiment.resuming import same_arguments, same_conversation
from covey.runtime.distributed import ALONE, joined_ranks, team_of
from covey.runtime.variables import check_ranks
from covey.tracking.console import RunResult
from covey.tracking.output import ignore_missing_widgets
from covey.tracking.run_folder import claim_run_dir

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
    inputs = _inputs(config, task, rewards)
    with joined_ranks():
        team = team_for(config)
        builder = open_builder(config, task, rewards, team, environment, algorithm)
        launch = launch or Launch.from_python(recipe_name, task, rewards, own, conversation, algorithm)
        try:
            run_dir = config.run_dir or (lambda: claim_run_dir(Path(recipe_name).stem))
            with begun(team, run_dir, builder.config, launch) as job:
                return job.run(builder, inputs, own)
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
    limits: Mapping[str, Any] = MappingProxyType({}),
) -> Summary | None:
    """Resume a run that was stopped or killed; its results are those of an uninterrupted run.

    A finished run goes on beyond its `limits`: {"steps": 200} is its new number of all steps. Other limits are
    token_budget, time_budget and patience. A falling learning rate begins again and falls over the added steps.

    If the run was started with a task, rewards, a conversation, an algorithm or observers of its own in Python, pass
    them again. What they compute is not compared with what they computed before.

    Raises:
        RunError: as `run`.
        ConfigError: if the folder has no run that can be resumed, its settings, its data or the files of its
            functions have changed since it began, or a limit is reached already.
        MachineError: for a fault of the machine; the run keeps its progress.
    """
    rewards, own = _listed(rewards), check_observers(observers)
    with joined_ranks(), resumed(team_of(0), run_dir, "train", limits) as job:
        same_arguments(job.launch, run_dir, task, rewards, algorithm)
        config, environment = same_conversation(job.config, conversation)
        assert not isinstance(config, RewardModelTraining)  # it is a run of covey train
        validate(config, own_task=task is not None, own_rewards=bool(rewards), own_environment=environment is not None)
        check_ranks(config)
        keep_hub_data(config, job.origin["inputs"] if job.origin else {})
        inputs = _inputs(config, task, rewards)
        job.refuse_changed(inputs)
        team = team_for(config)
        builder = open_builder(config, task, rewards, team, environment, algorithm)
        try:
            return job.run(builder, inputs, own)
        finally:
            builder.close()


def _inputs(config: RunConfig | ControlConfig, task: Any, rewards: Sequence[Reward]) -> dict[str, str]:
    """Checksums of what a run reads, of which a script gave `task` and `rewards`."""
    found = input_checksums(config, own_task=task is not None, own_rewards=bool(rewards))
    if task is None and isinstance(config, RunConfig) and isinstance(config.task, DatasetConfig):
        from covey.llm.data.rows import image_checksums

        found |= image_checksums(config.task)
    return found


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
        from covey.experiment.evaluation import report_backend
        from covey.experiment.llm import LLMBuilder
        from covey.llm.model.files import CAUSAL, IMAGES
        from covey.llm.model.loading import check_model_files

        assert isinstance(builder, LLMBuilder)
        example = builder.problem.image_prompt
        check_model_files(config.model, CAUSAL if example is None else IMAGES)
        return [*builder.problem.prompt_as_read(), *builder.notes, report_backend(config, example)]
    return list(builder.notes)
