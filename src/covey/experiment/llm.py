"""Builds the components of a run on a language model from its config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from covey.algorithms import Algorithm
from covey.config import ConfigError, RunConfig
from covey.config.common import NOT_BY_GROUP
from covey.config.fields import plural
from covey.config.model_sources import ARCHITECTURE_FOLDER
from covey.data import Team
from covey.experiment.adaptation import Adaptation, AllWeights, adapt, check_first_adapter
from covey.experiment.build import (
    Experiment,
    PolicyBuilder,
    Reward,
    build_checkpoints,
    build_kl_coefficient,
    build_learners,
    build_replay,
)
from covey.experiment.conversations import build_rollout_kind
from covey.experiment.divided_weights import Models, divide
from covey.experiment.evaluate_llm import HeldOut
from covey.experiment.external_sampler import build_generator, describe_sampler
from covey.experiment.iteration import build_iterated_reward_model
from covey.experiment.llm_components import (
    build_collector,
    build_critic,
    build_group_size,
    build_llm_algorithm,
    build_recorder,
    build_reference_updater,
    build_selection,
    with_outputs,
)
from covey.experiment.problem import Problem, build_problem, fit_prompts
from covey.llm.generation.backend import find_kernels
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.generation.token_sampling import Truncation
from covey.llm.grader import CALL_FILE, RunGrader
from covey.llm.model.architecture import position_limit
from covey.llm.model.chat import Chat
from covey.llm.model.loading import find_chat, load_model, resolve_checkpoint, save_architecture
from covey.llm.model.logprobs import MinimumLength
from covey.llm.model.recompute import recompute_layers
from covey.llm.model.stop_strings import stop_strings
from covey.llm.policy import LanguagePolicy
from covey.llm.reward_models.iteration import IteratedRewardModel
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks.prompt_limit import Note
from covey.runtime.device import (
    choose_device,
    choose_precision,
    environment,
    keep_freed_memory,
    limit_kernel_caches,
    set_threads,
)
from covey.runtime.distributed import ALONE, describe_team
from covey.tracking.console import Display
from covey.tracking.run_folder import ROLLOUTS_FOLDER, write_folders
from covey.tracking.run_store import MODEL_FOLDER, REWARD_MODEL_FOLDER, RunStore
from covey.train.iterate import iterate
from covey.train.loop import train
from covey.train.state import Components, FixedRewards, LoopConfig


@dataclass(frozen=True)
class Machine:
    """Device and precision of a run."""

    device: torch.device
    dtype: torch.dtype


def build_machine(device: str, precision: str, threads: int) -> Machine:
    """Choose device and precision, and set the number of threads.

    Raises:
        ConfigError: if the device does not exist.
    """
    set_threads(threads)
    keep_freed_memory()
    limit_kernel_caches()
    chosen = choose_device(device)
    return Machine(chosen, choose_precision(precision, chosen))


@dataclass
class LoadedPolicy:
    """A policy, its chat template, and a sampler on its weights."""

    policy: LanguagePolicy
    chat: Chat
    sampler: LanguageSampler
    adaptation: Adaptation = field(default_factory=AllWeights)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in the format of transformers."""
        self.policy.save(folder)
        self.chat.tokenizer.save_pretrained(folder)


def load_policy(config: RunConfig, machine: Machine) -> LoadedPolicy:
    """Load the model of a run.

    Raises:
        ConfigError: if it cannot be found or loaded.
    """
    with ThreadPoolExecutor(1) as executor:
        executor.submit(find_kernels, machine.device)  # may compile, which takes about 20 s
        loaded = load_model(config.model, dtype=machine.dtype, device=machine.device)
    sampling, chat = config.sampling, loaded.chat.with_config(config.chat)
    policy = LanguagePolicy(
        loaded.module,
        temperature=sampling.temperature,
        microbatch_tokens=config.update.microbatch_tokens,
        minimum=MinimumLength(sampling.min_new_tokens, chat.end_ids),
    )
    if config.update.recompute:
        recompute_layers(policy.module)
    sampler = LanguageSampler(
        LocalGenerator(policy), chat, config.seed, sampling.max_new_tokens, sampling.temperature,
        sampling.rows_at_once, stop=stop_strings(chat, sampling.stop),
        truncation=Truncation(min_new_tokens=sampling.min_new_tokens),
    )  # fmt: skip
    return LoadedPolicy(policy, chat, sampler)


class LLMBuilder(PolicyBuilder):
    """Builder of a run on a language model; implements `covey.experiment.build.ExperimentBuilder`."""

    name = "language"
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
        self.config = replace(config, model=resolve_checkpoint(config.model))
        self.team = team
        self._open = ExitStack()  # what ends with the run
        self.chosen = build_machine(config.device, config.precision, config.threads)
        self._adapter_notes = check_first_adapter(self.config)
        self.kind = build_rollout_kind(config, environment)
        self._open.callback(self.kind.close)
        try:
            self.problem = build_problem(config, task, rewards, self.kind)
            self._open.callback(lambda: self.problem.grader.close())
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
                self.problem = fit_prompts(
                    self.problem, self.config, chat, model_config, lambda line: self._note(line), kind=self.kind
                )
            except ConfigError:
                self.close()
                raise
            self._prompts_fit = True
        return self.problem

    @property
    def score_kind(self) -> str:
        return self.problem.grader.score_kind

    @property
    def notes(self) -> list[str]:
        of_problem = self.problem.notes(self.config.evaluation.problems, "evaluation.problems")
        return [*of_problem, *self._prompt_notes, *self.kind.notes(), *self._adapter_notes]

    def describe(self) -> str:
        config, sampling = self.config, self.config.sampling
        first, last = sampling.group_size, sampling.final_group_size
        size = f"{first} to {plural(last, 'rollout')}" if last else plural(first, "rollout")
        kind = " (adaptive)" if sampling.adaptive else ""
        return (
            f"{self.algorithm.name} on {config.model}, {plural(config.steps, 'step')} of "
            f"{plural(sampling.prompts_per_step, 'prompt')} x {size}{kind}; "
            f"{self.chosen.device.type}, "
            f"{str(self.chosen.dtype).removeprefix('torch.')}{describe_team(self.team)}{describe_sampler(config.sampler)}"
        )

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Load the model, copy it as the reference, and build the components."""
        config = self.config
        loaded = self._load(store, display)
        self._note = display.note
        problem = self._fit_prompts(loaded.chat, loaded.policy.module.config)
        problem.grader.use_chat(loaded.chat)
        loaded.sampler.ready = problem.grader.start  # groups are graded while others are sampled
        _note_unused_step_rewards(config, problem, display)
        algorithm = self.algorithm
        critics = (build_critic(config, loaded.policy, loaded.adaptation, display),) if algorithm.needs_critic else ()
        reference = loaded.adaptation.reference(loaded.policy)
        models = divide(loaded.policy, reference, critics, loaded.adaptation, config, self.team)
        policy = with_outputs(models, config, algorithm)
        loaded.sampler.generator, sampler_weights = build_generator(config, models.policy, self.team)
        self._open.callback(loaded.sampler.generator.close)
        kl_coefficient = build_kl_coefficient(algorithm.kl, config.loss)
        iterated = _iterated(config, problem, loaded, store, display)
        held_out = HeldOut(
            config.evaluation, problem.held_out, problem.grader, loaded.sampler, display, store, self.team,
            sampler_weights,
        )  # fmt: skip
        learners = build_learners(
            config, algorithm, policy, kl_coefficient, models.trained, models.critics,
            shared_trunk=config.critic.trunk == "policy", team=self.team,
        )  # fmt: skip
        grader = RunGrader(problem.grader, self.team, store.run_dir / ROLLOUTS_FOLDER / CALL_FILE)
        if note := grader.unfinished():
            display.note(note)
        parts = Components(
            task=problem.task,
            sampler=loaded.sampler,
            grader=grader,
            policy=policy,
            reference=models.reference,
            reference_updater=build_reference_updater(config, models),
            algorithm=algorithm,
            learners=learners,
            kl_coefficient=kl_coefficient,
            reward_model=next(iter(iterated), FixedRewards()),
            selection=build_selection(config.selection),
            replay=build_replay(config.replay),
            collector=build_collector(config),
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
            parts, _loop_config(config), held_out.measure, lambda: _collect(models, loaded, iterated),
            machine, lambda: {"model": config.model}, iterate if config.iteration.steps else train,
        )  # fmt: skip

    def _load(self, store: RunStore, display: Display) -> LoadedPolicy:
        """Load the policy, and write config and tokenizer into the run folder; checkpoints have the weights only."""
        loaded = load_policy(self.config, self.chosen)
        loaded.policy, loaded.adaptation = adapt(loaded.policy, self.config)
        loaded.sampler = self.kind.sampler(loaded.sampler)
        loaded.adaptation.check_architecture(store.shared_dir / ARCHITECTURE_FOLDER)

        def save(folder: Path) -> None:
            save_architecture(loaded.policy.module, loaded.chat.tokenizer, folder / ARCHITECTURE_FOLDER)
            loaded.adaptation.save_architecture(folder / ARCHITECTURE_FOLDER)

        write_folders(store.run_dir, save)
        display.note(loaded.policy.backend.describe())
        return loaded

    def drawable(self) -> bool:
        return False

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


def _note_unused_step_rewards(config: RunConfig, problem: Problem, display: Display) -> None:
    """Note for the user if there are step rewards and the algorithm compares whole rollouts."""
    by_outcome = config.loss.credit == "outcome" and config.algorithm not in NOT_BY_GROUP
    if by_outcome and problem.grader.splitter is not None:
        display.note("step rewards are only added up; loss.credit = process_return_to_go would compare steps")


def _loop_config(config: RunConfig) -> LoopConfig:
    return LoopConfig(
        steps=config.steps,
        seed=config.seed,
        starts_per_step=config.sampling.prompts_per_step,
        group_size=build_group_size(config),
        mask_truncated=config.loss.mask_truncated,
        checkpoint_every=config.checkpoint.every,
        iteration_steps=config.iteration.steps or 0,
        decision_budget=config.token_budget or math.inf,
        patience=config.evaluation.patience or math.inf,
        keep_best=config.checkpoint.best,
    )


def _collect(models: Models, loaded: LoadedPolicy, iterated: Sequence[IteratedRewardModel]) -> Callable[[Path], None]:
    """Collect the weights of all ranks; returns a function that writes them and the tokenizer into the run folder."""
    collected = [*models.collect(), *loaded.adaptation.folders()]

    def save(run_dir: Path) -> None:
        for folder, write in collected:
            write(run_dir / folder)
        loaded.chat.tokenizer.save_pretrained(run_dir / MODEL_FOLDER)
        for trained in iterated:
            trained.save(run_dir / REWARD_MODEL_FOLDER)

    return save
