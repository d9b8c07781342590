"""Builds the components of a run on a language model from its config."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.algorithms import Algorithm, Distillation, KLFromOutput
from covey.algorithms.advantages import (
    CreditAssignment,
    outcome,
    outcome_of_each_reward,
    process,
    process_by_step,
    process_return_to_go,
)
from covey.config import ConfigError, RunConfig
from covey.config.common import NOT_BY_GROUP, importance_cap
from covey.config.fields import plural
from covey.config.model_sources import ARCHITECTURE_FOLDER, MODEL_FOLDER, REWARD_MODEL_FOLDER
from covey.config.rules import VERIFIER
from covey.config.sft import RewardModelConfig, RewardModelKind
from covey.core import kl
from covey.core.schedules import restarted
from covey.data import Group, ReferenceUpdater, RewardModelUpdater, Start, Team
from covey.experiment.algorithm import build_algorithm, build_kl_coefficient, build_learners, build_pace, check_own
from covey.experiment.evaluation import SHARE, HeldOut
from covey.experiment.job import Experiment, ExperimentBuilder, Reward, build_checkpoints
from covey.experiment.models import (
    LoadedPolicy,
    Models,
    adapt,
    build_critic,
    check_first_adapter,
    divide,
    load_policy,
    load_teacher,
    with_outputs,
)
from covey.experiment.plan import sampling_room, with_vllm_memory
from covey.experiment.problem import WITH_IMAGES, Problem, build_problem, build_rollout_kind
from covey.experiment.resuming import read_origin
from covey.experiment.reward_models import build_reward_trainer
from covey.llm.critic import LanguageCritic
from covey.llm.grader import CALL_FILE, RewardGrader, RunGrader
from covey.llm.model.architecture import position_limit
from covey.llm.model.chat import Chat, TokenTexts
from covey.llm.model.loading import find_chat, resolve_checkpoint, save_architecture
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.generator import build_generator, describe_sampler
from covey.llm.reward_models.graded_groups import ExampleSource, GradeSource, PairSource, StepLabeller, StepSource
from covey.llm.reward_models.model import RewardModel
from covey.llm.reward_models.reward import ModelReward
from covey.llm.reward_models.training import IteratedRewardModel, Record
from covey.llm.rewards.step_splitter import StepSplitter
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks.prompt_limit import Note
from covey.llm.teacher import TeacherPrompts, check_tokens
from covey.runtime.device import build_machine, environment, idle_gpus_note
from covey.runtime.distributed import ALONE, ShardedTeam, describe_team
from covey.runtime.optimizer import EMAWeights
from covey.tracking.console import Display
from covey.tracking.run_folder import ITERATIONS_FILE, ROLLOUTS_FOLDER, write_folders
from covey.tracking.run_store import RunStore, write_records
from covey.train.collect import (
    AdaptiveGroups,
    Collector,
    DynamicSampling,
    FixedGroups,
    LogGroupSizes,
    WithTeacher,
    fixed_size,
    linear_size,
)
from covey.train.iterate import iterate
from covey.train.loop import train
from covey.train.pace import Pace
from covey.train.prepare import NO_REFERENCE
from covey.train.record import Recorder, RolloutRecorder, TokenRecorder, prompts_read
from covey.train.replay import build_replay
from covey.train.selection import ByExpectedSignal, PromptSelection
from covey.train.state import Components, LoopConfig

CREDITS: dict[str, CreditAssignment] = {
    "outcome": outcome,
    "process": process,
    "process_by_step": process_by_step,
    "process_return_to_go": process_return_to_go,
}


class LLMBuilder(ExperimentBuilder):
    """Builder of a run on a language model."""

    config: RunConfig

    def __init__(
        self,
        config: RunConfig,
        task: Any = None,
        rewards: Sequence[Reward | WeightedReward] = (),
        team: Team = ALONE,
        environment: Any = None,
        algorithm: Algorithm | None = None,
    ) -> None:
        """Build and test the task, the environment, the rewards and the algorithm before a model is loaded.

        Raises:
            ConfigError: if the data, the task, a reward, the algorithm, the device or the adapter is invalid.
        """
        teacher = config.teacher
        if teacher.is_own_model:
            teacher = replace(teacher, model=resolve_checkpoint(teacher.model))
        self.config = replace(config, model=resolve_checkpoint(config.model), teacher=teacher)
        self.team = team
        self._open = ExitStack()  # what ends with the run
        self.chosen = build_machine(config.device, config.precision, config.threads)
        with_vllm_memory(self.config, self.chosen.device)
        self._adapter_notes = check_first_adapter(self.config)
        kind = build_rollout_kind(self.config, environment)
        self._open.callback(kind.close)
        try:
            self.problem = build_problem(self.config, task, rewards, kind)
            self._open.callback(lambda: self.problem.grader.close())
            if team.size > 1 and self.problem.image_prompt is not None:
                raise ConfigError(f"{WITH_IMAGES} several ranks do not exchange: start one")
            self.algorithm = build_llm_algorithm(config, self.problem.grader.weights, algorithm)
        except BaseException:
            self._open.close()
            raise
        self._prompts_fit, self._prompt_notes = False, list[str]()
        self._note: Note = self._prompt_notes.append  # that of the display as soon as there is one
        found = find_chat(self.config.model)
        if found is not None:
            self._fit_prompts(found[0].with_config(config.chat), found[1])

    def _fit_prompts(self, chat: Chat, model_config: Any) -> Problem:
        """The problem without prompts that are too long. Those of a file are checked once, of a generated task the
        first ones; the others are when they are drawn.
        """
        if not self._prompts_fit:
            try:
                self._fit_to(chat, model_config)
            except ConfigError:
                self.close()
                raise
            self._prompts_fit = True
        return self.problem

    def _fit_to(self, chat: Chat, model_config: Any) -> None:
        """Fit the prompts to the policy and to a teacher, whose tokens are compared if it is on this machine."""
        teacher, of_teacher = self.config.teacher, None
        if teacher.is_own_model and (found := find_chat(teacher.model)) is not None:
            check_tokens(chat, found[0], teacher.model)
            of_teacher = found[1]
        same = None if teacher.prompt else of_teacher  # reads the same prompts
        self.problem = self.problem.fit(chat, model_config, lambda line: self._note(line), teacher=same)
        if teacher.prompt:
            self.problem.check_teacher(chat, [model_config, *filter(None, [of_teacher])])

    @property
    def score_kind(self) -> str:
        return self.problem.grader.score_kind

    @property
    def notes(self) -> list[str]:
        of_problem = self.problem.notes(self.config.evaluation.problems, "evaluation.problems")
        idle = filter(None, [idle_gpus_note(self.chosen.device)])
        return [*idle, *of_problem, *self._prompt_notes, *self.problem.kind.notes(), *self._adapter_notes]

    def describe(self) -> str:
        config, sampling = self.config, self.config.sampling
        first, last = sampling.group_size, sampling.final_group_size
        size = f"{first} to {plural(last, 'rollout')}" if last else plural(first, "rollout")
        kind = " (adaptive)" if sampling.adaptive else ""
        return (
            f"{self.algorithm.name} on {config.model}, {plural(config.steps, 'step')} of "
            f"{plural(sampling.prompts_per_step, 'prompt')} x {size}{kind}; "
            f"{self.chosen.describe()}{describe_team(self.team)}{describe_sampler(config.sampler)}"
        )

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Load the model, copy it as the reference if the run has a KL, and build the components."""
        config, chosen, pace = self.config, self.config.selection, build_pace(self.config)
        loaded = self._load(store, display)
        self._note = display.note
        problem = self._fit_prompts(loaded.chat, loaded.policy.module.config)
        problem.grader.use_chat(loaded.chat)
        loaded.sampler.ready = problem.grader.start  # groups are graded while others are sampled
        if problem.grader.splitter and config.loss.credit == "outcome" and config.algorithm not in NOT_BY_GROUP:
            display.note("step rewards are only added up; loss.credit = process_return_to_go would compare steps")
        algorithm = self.algorithm
        critics = (build_critic(config, loaded.policy, loaded.adaptation, display),) if algorithm.needs_critic else ()
        models = self._models(loaded, critics)
        policy = with_outputs(models, algorithm)
        room = None if isinstance(self.team, ShardedTeam) else sampling_room(config)
        sampled = with_vllm_memory(config, self.chosen.device)
        loaded.sampler.generator, sampler_weights = build_generator(sampled, models.policy, self.team, room)
        self._open.callback(loaded.sampler.generator.close)
        kl_coefficient = build_kl_coefficient(algorithm.kl, config.loss)
        iterated = _iterated(config, problem, loaded, store, display)
        origin = read_origin(store.run_dir)[0]
        held_out = HeldOut(
            config.evaluation, problem.held_out, problem.grader, loaded.sampler, display, store, self.team,
            sampler_weights, config.budget_seconds / SHARE, origin["before"] if origin else (),
        )  # fmt: skip
        learners = build_learners(
            config, algorithm, policy, kl_coefficient, models.trained, models.critics,
            shared_trunk=config.critic.trunk == "policy", team=self.team, pace=pace,
        )  # fmt: skip
        grader = RunGrader(problem.grader, self.team, store.run_dir / ROLLOUTS_FOLDER / CALL_FILE)
        if note := grader.unfinished():
            display.note(note)
        parts = Components(
            task=problem.task,
            sampler=loaded.sampler,
            grader=grader,
            policy=policy,
            reference=models.reference or NO_REFERENCE,
            reference_updater=build_reference_updater(config, models),
            algorithm=algorithm,
            learners=learners,
            kl_coefficient=kl_coefficient,
            reward_model=next(iter(iterated), RewardModelUpdater()),
            selection=ByExpectedSignal(**vars(chosen)) if chosen.candidates > 1 else PromptSelection(),
            replay=build_replay(config.replay),
            collector=build_collector(config, loaded.sampler, models),
            recorder=build_recorder(config, policy, loaded.chat, self.team),
            observers=() if self.team.rank else (store, display, *iterated),
            checkpoints=build_checkpoints(
                store, config.checkpoint.keep, self.team, best=config.checkpoint.best, in_parts=models.in_parts
            ),
            evaluate=lambda step: held_out.due(step) | problem.metrics() | loaded.sampler.metrics(),
            critics=models.critics,
            team=self.team,
            weights=sampler_weights,
        )
        machine = environment(self.chosen.device, self.chosen.dtype) | loaded.policy.backend.recorded()
        return Experiment(
            parts, self._settings(pace), held_out.measure, lambda: _collect(models, loaded, iterated),
            machine, lambda: {"model": config.model}, iterate if config.iteration.steps else train,
        )  # fmt: skip

    def _models(self, loaded: LoadedPolicy, critics: Sequence[LanguageCritic]) -> Models:
        """The models after the ranks have divided their weights, with a reference and a teacher if they are needed."""
        config, policy, adaptation = self.config, loaded.policy, loaded.adaptation
        has_reference = self.algorithm.kl.acts_within(config.steps) or config.teacher.model == "reference"
        reference = adaptation.reference(policy) if has_reference else None
        teacher = load_teacher(config, policy, loaded.chat, self.chosen)
        return divide(policy, reference, critics, adaptation, config, self.team, teacher)

    def _settings(self, pace: Pace) -> LoopConfig:
        config, sampling = self.config, self.config.sampling
        first, last = sampling.group_size, sampling.final_group_size
        return LoopConfig(
            steps=config.steps,
            seed=config.seed,
            starts_per_step=sampling.prompts_per_step,
            group_size=fixed_size(first)
            if last is None
            else pace.over(
                restarted(
                    lambda begin, end: linear_size(first, last, end - begin),
                    config.steps,
                    config.schedule_restarts,
                )
            ),
            mask_truncated=config.loss.mask_truncated,
            checkpoint_every=config.checkpoint.every,
            iteration_steps=config.iteration.steps or 0,
            decision_budget=config.token_budget or math.inf,
            patience=config.evaluation.patience or math.inf,
            keep_best=config.checkpoint.best,
            pace=pace,
        )

    def _load(self, store: RunStore, display: Display) -> LoadedPolicy:
        """Load the policy, and write config and tokenizer into the run folder; checkpoints have the weights only."""
        loaded = load_policy(self.config, self.chosen, self.problem.image_prompt)
        loaded.policy, loaded.adaptation = adapt(loaded.policy, self.config)
        loaded.sampler = self.problem.kind.sampler(loaded.sampler)
        loaded.adaptation.check_architecture(store.shared_dir / ARCHITECTURE_FOLDER)

        def save(folder: Path) -> None:
            save_architecture(loaded.policy.module, loaded.chat, folder / ARCHITECTURE_FOLDER)
            loaded.adaptation.save_architecture(folder / ARCHITECTURE_FOLDER)

        write_folders(store.run_dir, save)
        display.note(loaded.policy.backend.describe())
        return loaded

    def close(self) -> None:
        self._open.close()


def _iterated(
    config: RunConfig, problem: Problem, loaded: LoadedPolicy, store: RunStore, display: Display
) -> Sequence[IteratedRewardModel]:
    """The training of the reward model, if the run is iterative."""
    if not config.iteration.steps:
        return ()
    held_out = problem.held_out[: config.iteration.evaluation_problems]
    positions = position_limit(loaded.policy.module.config)
    return (build_iterated_reward_model(config, problem.grader, loaded.sampler, positions, held_out, store, display),)


def _collect(models: Models, loaded: LoadedPolicy, iterated: Sequence[IteratedRewardModel]) -> Callable[[Path], None]:
    """Collect the weights of all ranks; returns a function that writes them and the tokenizer into the run folder."""
    collected = [*models.collect(), *loaded.adaptation.folders()]

    def save(run_dir: Path) -> None:
        for folder, write in collected:
            write(run_dir / folder)
        loaded.chat.save(run_dir / MODEL_FOLDER)
        for trained in iterated:
            trained.save(run_dir / REWARD_MODEL_FOLDER)

    return save


def build_llm_algorithm(
    config: RunConfig, reward_weights: Mapping[str, float], own: Algorithm | None = None
) -> Algorithm:
    """The algorithm of a run. `reward_weights` has the weight of every reward that the grader calls.

    Raises:
        ConfigError: if the user's `own` algorithm does not work, or does not fit the config.
    """
    loss = config.loss
    each = loss.normalize_rewards == "each"
    algorithm = (
        check_own(own, config, tuple(reward_weights))
        if own is not None
        else build_algorithm(
            config.algorithm,
            replace(loss, kl_coefficient=config.kl_coefficient, importance_cap=importance_cap(loss, config.replay)),
            max_length=config.rollout_limit,
            credit=outcome_of_each_reward(reward_weights) if each else CREDITS[loss.credit],
            gamma=loss.gamma,
        )
    )
    if config.teacher.model:
        distillation = Distillation(config.teacher.weight, config.teacher.mixture)
        algorithm = replace(algorithm, distillation=distillation)
    if algorithm.kl.placement.estimator is not kl.exact:
        return algorithm
    # The exact KL over a vocabulary is computed in the forward pass: the probabilities of all tokens are never stored.
    return replace(algorithm, kl=replace(algorithm.kl, placement=KLFromOutput()))


def build_reference_updater(config: RunConfig, models: Models) -> ReferenceUpdater:
    """In an iterative run, the reference of an iteration is the policy at its beginning."""
    every = config.reference.refresh_every or config.iteration.steps
    reference, leader = models.reference, models.policy
    if not every or reference is None:
        return ReferenceUpdater()
    return EMAWeights(
        reference.trained,
        leader.trained,
        config.reference.refresh_fraction,
        every=every,
        division=reference.weights,
    )


def build_recorder(config: RunConfig, policy: LanguagePolicy, chat: Chat, team: Team) -> Recorder:
    """Records the tokens of rollouts if the config says so."""
    texts = TokenTexts(chat.tokenizer)
    prompts = partial(prompts_read, texts)
    return TokenRecorder(policy, texts, team, prompts) if config.record.tokens else RolloutRecorder(prompts)


def build_collector(config: RunConfig, sampler: LanguageSampler, models: Models) -> Collector:
    sampling = config.sampling
    collector: Collector = DynamicSampling(config.max_resamples) if config.max_resamples else FixedGroups()
    if sampling.adaptive:
        collector = AdaptiveGroups(sampling.initial_group_size, sampling.max_group_size or 0)
    if models.teacher is not None and config.teacher.prompt:
        readers = [one.module.config for one in (models.policy, models.teacher)]
        prompts = TeacherPrompts(config.teacher.prompt, sampler.context_of, readers)
        collector = WithTeacher(collector, prompts.contexts)
    return collector if sampling.final_group_size is None else LogGroupSizes(collector)


BOUNDARY = "line"  # end of a step for a process model without per_step
MEASURING = 1 << 31  # added to an iteration for the random numbers of its evaluation, which no training step has


def build_iterated_reward_model(
    config: RunConfig,
    grader: RewardGrader,
    sampler: LanguageSampler,
    positions: int | None,
    held_out: Sequence[Start],
    store: RunStore,
    display: Display,
) -> IteratedRewardModel:
    """The training of the reward model among the run's rewards, with the reward that evaluations average as verifier.

    Args:
        sampler: samples from the run's policy.
        positions: longest sequence of the policy's model; None: any.
        held_out: problems on which the reward model is measured.

    Raises:
        ConfigError: if the rewards have not exactly one reward model and a verifier.
    """
    models = [reward for reward in grader.rewards if isinstance(reward.caller, ModelReward)]
    if len(models) != 1:
        raise ConfigError(
            f"an iterative run trains one reward model, and its rewards have {len(models)}: give one "
            "RewardConfig(model=...)"
        )
    if grader.score_kind != "accuracy":
        raise ConfigError(
            "an iterative run labels completions with a verifier, the reward with score = true, which must be always 1 "
            f"or 0: add {VERIFIER}"
        )
    (proxy,) = models
    runner = proxy.caller
    assert isinstance(runner, ModelReward)
    if runner.loaded().kind is RewardModelKind.PROCESS:
        source: ExampleSource = _step_source(config, grader, sampler, positions)
    elif config.iteration.data == "pairs":
        source = PairSource(config.seed, config.iteration.examples_per_group)
    else:
        source = GradeSource(config.seed, config.iteration.examples_per_group)

    def sample(iteration: int) -> list[Group]:
        with display.progress(f"completions of {plural(len(held_out), 'held-out problem')}", 1) as advance:
            groups = grader.grade(sampler.sample(held_out, config.sampling.group_size, MEASURING + iteration))
            advance(1)
        return groups

    training = _training_config(config, runner)
    return IteratedRewardModel(
        config.iteration,
        training,
        source,
        proxy,
        _each_time_but_first(runner),
        lambda model: build_reward_trainer(model, training, source.objective),
        sample,
        IterationMonitor(store, display),
    )


class IterationMonitor:
    """Shows trainings of the reward model on the display, and writes `iterations.jsonl`."""

    def __init__(self, store: RunStore, display: Display) -> None:
        self._store, self._display = store, display

    def progress(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        return self._display.progress(label, total)

    def record(self, records: Sequence[Record], *, restored: bool = False) -> None:
        write_records(self._store.run_dir / ITERATIONS_FILE, records)
        if not restored:
            self._display.note(describe(records[-1]))


def describe(record: Record) -> str:
    """An iteration in one line."""
    parts = [f"iteration {record['iteration']}: reward model not trained"]
    if record["optimizer_steps"]:
        replayed = f" ({record['replayed']:,} replayed)" if record["replayed"] else ""
        parts = [f"iteration {record['iteration']}: reward model on {plural(record['examples'], 'example')}{replayed}"]
    for name, words in (
        ("accuracy", "accuracy"), ("auc", "AUC"), ("calibration_error", "calibration error"),
        ("rank_agreement", "rank agreement"), ("proxy_reward", "proxy reward"),
    ):  # fmt: skip
        before, after = record["before"].get(name), record["after"].get(name)
        if before is not None and after is not None:
            parts.append(
                f"{words} {before:.3f} to {after:.3f}" if record["optimizer_steps"] else f"{words} {before:.3f}"
            )
    parts += [f"true reward {record['true_reward']:.3f}"] if "true_reward" in record else []
    return ", ".join(parts)


def _each_time_but_first(runner: ModelReward) -> Callable[[], RewardModel]:
    """Loads the model of the recipe; the first call returns the one that is loaded already."""
    calls = iter([runner.loaded])
    return lambda: next(calls, runner.reload)()


def _training_config(config: RunConfig, runner: ModelReward) -> RewardModelConfig:
    iteration = config.iteration
    return RewardModelConfig(
        model=runner.config.model,
        batch_size=iteration.reward_model_batch_size,
        learning_rate=iteration.reward_model_learning_rate,
        schedule="constant",
        microbatch_tokens=config.update.microbatch_tokens,
        seed=config.seed,
    )


def _step_source(
    config: RunConfig, grader: RewardGrader, sampler: LanguageSampler, positions: int | None
) -> StepSource:
    """Labels steps with the run's verifier, which shares its processes with the run's grader."""
    splitter = grader.splitter or StepSplitter(BOUNDARY)
    splitter.chat = sampler.chat
    verifier = RewardGrader([_verifier(grader)])
    labeller = StepLabeller(sampler, splitter, verifier, config.iteration.continuations, positions)
    return StepSource(labeller, config.iteration.examples_per_group, config.iteration.estimate)


def _verifier(grader: RewardGrader) -> WeightedReward:
    (scored,) = [reward for reward in grader.rewards if reward.name == grader.score_name]
    return replace(scored, weight=1.0, score=True)
