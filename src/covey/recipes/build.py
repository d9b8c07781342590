"""From a config to the parts of a run. The one place where all the pieces meet."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from covey.algorithms import ALGORITHMS, Algorithm, KLPenalty
from covey.config import ConfigError, RunConfig, UpdateConfig
from covey.core import kl, schedules
from covey.data import Task
from covey.llm.chat import Chat
from covey.llm.grader import RewardGrader, WeightedReward, build_grader
from covey.llm.loading import load_model
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks import build_task
from covey.observe.display import Display
from covey.observe.run_store import CHECKPOINTS_FOLDER, RunStore
from covey.recipes.held_out import HeldOut
from covey.runtime.checkpoint import CheckpointFolder
from covey.runtime.device import choose_device, choose_precision, set_threads
from covey.runtime.optimizer import MasterAdamW
from covey.train.loop import Parts, Settings
from covey.train.update import UpdatePlan

Reward = Callable[..., Any] | WeightedReward

SCHEDULES: dict[str, Callable[..., schedules.Schedule]] = {"linear": schedules.linear, "cosine": schedules.cosine}
KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


@dataclass(frozen=True)
class Problem:
    """What is to be learnt: where prompts come from and what their answers are worth."""

    task: Task
    grader: RewardGrader


@dataclass(frozen=True)
class Machine:
    """What the run computes on."""

    device: torch.device
    dtype: torch.dtype


def build_problem(config: RunConfig, task: Task | None = None, rewards: Sequence[Reward] = ()) -> Problem:
    """Task and grader, each tried out on a few prompts, so that a mistake is found before a model is loaded.

    Args:
        config: names the task and rewards that are not given.
        task: one of your own, for scripts.
        rewards: Python functions with TRL's signature, for scripts.

    Raises:
        ConfigError: where the data, the task or a reward is unusable.
    """
    if task is None and config.task is None:
        raise ConfigError("there is no task: add a [task] table, or hand one to run(config, task=...)")
    task = task or build_task(config.task)
    default = getattr(task, "default_rewards", ())
    if not (rewards or config.rewards or default):
        raise ConfigError(
            "there is no reward: add a [[rewards]] table, or hand functions to run(config, rewards=[...])"
        )
    grader = build_grader(rewards or config.rewards, default)
    task.held_out(config.evaluation.problems)
    try:
        grader.check(task.draw(config.seed, 1, 2))
    except ConfigError:
        grader.close()
        raise
    return Problem(task, grader)


def build_machine(device: str, precision: str, threads: int) -> Machine:
    """Choose where and how to compute.

    Raises:
        ConfigError: for a device that is not there.
    """
    set_threads(threads)
    chosen = choose_device(device)
    return Machine(chosen, choose_precision(precision, chosen))


@dataclass
class LoadedPolicy:
    """A policy, how it talks, and a sampler on its weights."""

    policy: LanguagePolicy
    chat: Chat
    sampler: LanguageSampler

    def save(self, folder: Path) -> None:
        """Write model and tokenizer so that transformers loads them unchanged."""
        self.policy.save(folder)
        self.chat.tokenizer.save_pretrained(folder)


def load_policy(config: RunConfig, machine: Machine) -> LoadedPolicy:
    """Load the model of a run.

    Raises:
        ConfigError: where it cannot be found or loaded.
    """
    loaded = load_model(config.model, dtype=machine.dtype, device=machine.device)
    sampling = config.sampling
    policy = LanguagePolicy(
        loaded.module, temperature=sampling.temperature, microbatch_tokens=config.update.microbatch_tokens
    )
    sampler = LanguageSampler(
        policy, loaded.chat, config.seed, sampling.max_new_tokens, sampling.temperature, sampling.rows_at_once
    )
    return LoadedPolicy(policy, loaded.chat, sampler)


def build_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm by its name, with the fields of [loss] that are set."""
    build = ALGORITHMS[config.algorithm]
    parameters = inspect.signature(build).parameters
    default: KLPenalty = parameters["kl"].default
    loss = config.loss
    coefficient = default.coefficient(1) if loss.kl_coefficient is None else loss.kl_coefficient
    options: dict[str, Any] = {
        "kl": replace(
            default,
            coefficient=schedules.constant(coefficient, warmup_steps=loss.kl_warmup_steps),
            estimator=KL_ESTIMATORS[loss.kl_estimator] if loss.kl_estimator else default.estimator,
        )
    }
    for name in ("clip_low", "clip_high", "dual_clip"):
        value = getattr(loss, name)
        if value is not None:
            if name not in parameters:
                raise ConfigError(f"algorithm {config.algorithm!r} does not clip: leave out loss.{name}")
            options[name] = value
    if "max_length" in parameters:
        options["max_length"] = config.sampling.max_new_tokens
    return build(**options)


def learning_rate(update: UpdateConfig, steps: int) -> schedules.Schedule:
    """The learning rate of every step."""
    if update.schedule == "constant":
        return schedules.constant(update.learning_rate, warmup_steps=update.warmup_steps)
    return SCHEDULES[update.schedule](update.learning_rate, steps=steps, warmup_steps=update.warmup_steps)


def build_parts(
    config: RunConfig, problem: Problem, loaded: LoadedPolicy, store: RunStore, display: Display
) -> tuple[Parts, Settings, HeldOut]:
    """Everything that the loop runs on."""
    update = config.update
    frozen = copy.deepcopy(loaded.policy.module).requires_grad_(False)
    reference = LanguagePolicy(
        frozen, temperature=config.sampling.temperature, microbatch_tokens=update.microbatch_tokens
    )
    held_out = HeldOut(config.evaluation, problem.task, problem.grader, loaded.sampler, display)
    parts = Parts(
        task=problem.task,
        sampler=loaded.sampler,
        grader=problem.grader,
        policy=loaded.policy,
        reference=reference,
        algorithm=build_algorithm(config),
        optimizer=MasterAdamW(
            loaded.policy.module,
            lr=update.learning_rate,
            betas=(update.beta1, update.beta2),
            weight_decay=update.weight_decay,
            max_grad_norm=update.max_grad_norm,
        ),
        observers=(store, display),
        checkpoints=CheckpointFolder(
            store.run_dir / CHECKPOINTS_FOLDER, config.checkpoint.keep, before_save=store.sync
        ),
        evaluate=held_out.due,
    )
    settings = Settings(
        steps=config.steps,
        seed=config.seed,
        prompts_per_step=config.sampling.prompts_per_step,
        group_size=config.sampling.group_size,
        plan=UpdatePlan(update.epochs, update.minibatches),
        learning_rate=learning_rate(update, config.steps),
        mask_truncated=config.loss.mask_truncated,
        checkpoint_every=config.checkpoint.every,
    )
    return parts, settings, held_out
