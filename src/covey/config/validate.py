"""Validate configs: one line refuses a run that cannot work and names the fix, before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, cast

from covey.config import (
    TASK_CONFIGS,
    ConfigError,
    ControlConfig,
    DatasetConfig,
    EvaluationConfig,
    LossBase,
    ReasoningGymConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    UpdateBase,
    UpdateConfig,
)
from covey.config.chat import check_chat, check_stop
from covey.config.data_paths import check_data
from covey.config.fields import (
    check_fields,
    get_type_hints,
    is_a,
    iter_fields,
    or_list,
    toml_repr,
)
from covey.config.model_sources import locate_model
from covey.config.validate_cluster import check_cluster
from covey.config.validate_collection import NOT_BY_GROUP, check_collection
from covey.config.validate_conversation import check_conversation
from covey.config.validate_entropy import check_entropy
from covey.config.validate_iteration import check_iteration
from covey.config.validate_kl import check_kl, check_language_kl
from covey.config.validate_lora import check_lora
from covey.config.validate_process import check_process
from covey.config.validate_reasoning_gym import check_reasoning_gym
from covey.config.validate_replay import check_replay
from covey.config.validate_rewards import check_normalization, check_rewards
from covey.config.validate_rollouts import check_rollouts
from covey.config.validate_sampler import check_sampler
from covey.config.validate_selection import check_selection
from covey.config.validate_size import check_control_size, check_size
from covey.config.validate_trackers import check_trackers

WITHOUT_RATIO = ("rloo", "reinforce")  # algorithms whose surrogate has no ratio to clip, so they are on-policy only
# Fields that only some algorithms or one kind of rollouts use; any other is refused if they are set.
USED_ONLY_BY = {
    "policy.critic_hidden": ("ppo",),
    "critic.trunk": ("ppo",),
    "loss.value_coefficient": ("ppo",),
    "loss.value_clip": ("ppo",),
    "loss.gae_lambda": ("ppo",),
    "loss.gamma": ("ppo", "reinforce_pp"),
    "loss.whiten": ("ppo",),
    "update.critic_learning_rate": ("ppo",),
    "update.critic_epochs": ("ppo",),
    "update.critic_warmup_steps": ("ppo",),
    "rollouts.fragment_steps": ("fragments",),
    "rollouts.horizon": ("branches",),
}
NOT_USED_BY = {
    "rollouts.starts_per_step": "fragments",
    "rollouts.group_size": "fragments",
    "rollouts.environments": "branches",
}


def validate(
    config: RunConfig | ControlConfig,
    *,
    own_task: bool = False,
    own_rewards: bool = False,
    own_environment: bool = False,
    labels: bool = False,
) -> None:
    """Refuse a run that cannot work: wrong types, values out of range, combinations that contradict each other.

    Reads the file system, for example to check that the data file exists, but loads no model and runs no user code.

    Args:
        own_task: a script gives the task, so the config needs none.
        own_rewards: a script gives the rewards, so the config needs none.
        own_environment: a script gives the environment of conversations, of which the config has the name.
        labels: completions or their steps are labelled, so process.boundary needs no step reward.

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    _check_tables(config)
    if isinstance(config, ControlConfig):
        _validate_control(config)
    else:
        _validate_language(config, own_task, own_rewards, own_environment, labels)
    check_trackers(config.trackers)


def _check_tables(config: Any) -> None:
    """Refuse values of the wrong type in place of tables, which a config from Python can have."""
    if not isinstance(config, RunConfig | ControlConfig):
        kind = type(config).__name__
        raise ConfigError(f"the config is of type {kind}: give a RunConfig or a ControlConfig, as RunConfig(steps=20)")
    tables: dict[str, Any] = get_type_hints(cast(Any, type(config)))
    for name, table in tables.items():
        value = getattr(config, name)
        if is_dataclass(table) and not isinstance(value, cast(Any, table)):
            raise ConfigError(f"{name} must be {cast(Any, table).__name__}(...) (is {toml_repr(value)})")
    if isinstance(config, RunConfig) and not isinstance(config.conversation.environment, str):
        raise ConfigError(
            "the environment of a config is a name, such as file.py:Class; a class or a function is given to "
            "run(config, conversation=covey.Conversation(...))"
        )
    rewards = getattr(config, "rewards", ())
    for reward in rewards if isinstance(rewards, tuple | list) else (rewards,):
        if not isinstance(reward, RewardConfig):
            raise ConfigError(
                f"the rewards of a config are RewardConfig(...), and one is of type {type(reward).__name__}; functions "
                "are given to run(config, rewards=[...])"
            )


def _validate_language(
    config: RunConfig, own_task: bool, own_rewards: bool, own_environment: bool, labels: bool
) -> None:
    if config.task is None and not own_task:
        raise ConfigError(
            f'no task: add a [task] table with name = "arithmetic" (or {or_list(list(TASK_CONFIGS)[1:])}), '
            'or for control an [environment] table with id = "CartPole-v1"'
        )
    if config.task is not None and type(config.task) not in TASK_CONFIGS.values():
        raise ConfigError(f"task must be one of the task configs in covey.config (is {type(config.task).__name__})")
    _check_sampling(
        config.sampling, config.algorithm
    )  # before the limits of single fields, because its messages give the reason
    _check_loss(config.loss, config.algorithm)
    check_fields(config)
    _check_minimum(config.sampling)
    check_stop(config.sampling.stop)
    check_chat(config.chat)
    check_size(config)
    _check_epochs(config.update, config.algorithm)
    _check_critic_warmup(config)
    _check_minibatches(config.sampling, config.update)
    check_collection(config)
    check_cluster(config)
    check_language_kl(config)
    check_entropy(config.loss, config.update, config.algorithm)
    _refuse_unused(config)
    _check_evaluation(config.evaluation)
    _check_held_out(config)
    check_task(config.task)
    check_rewards(config)
    check_normalization(config.loss, config.algorithm)
    check_process(config, other_rewards=own_rewards or labels)
    check_sampler(config)
    check_conversation(config, own_environment=own_environment)
    check_iteration(config, own_rewards=own_rewards)
    check_lora(config)
    check_selection(config.selection)
    check_replay(config)
    locate_model(config.model)


def _validate_control(config: ControlConfig) -> None:
    if not config.environment.id:
        raise ConfigError('no environment: give the table [environment] an id, such as id = "CartPole-v1"')
    _check_loss(config.loss, config.algorithm)
    check_fields(config)
    check_control_size(config)
    check_rollouts(config)
    _check_epochs(config.update, config.algorithm)
    _check_critic_warmup(config)
    check_kl(config.loss, config.update, config.loss.kl_coefficient, config.replay)
    check_replay(config)
    check_entropy(config.loss, config.update, config.algorithm)
    rollouts = config.rollouts
    parts, count = config.update.minibatches, rollouts.fragment_steps * rollouts.copies
    if rollouts.kind == "fragments" and count % parts:
        raise ConfigError(
            f"the decisions of rollouts.fragment_steps x copies ({count}) cannot be split evenly into "
            f"update.minibatches ({parts}); set minibatches to {largest_divisor(count, parts)}"
        )
    _refuse_unused(config, rollouts.kind)
    _check_held_out(config)


def _refuse_unused(config: RunConfig | ControlConfig, kind: str = "") -> None:
    """Refuse fields that are set although the algorithm or the kind of rollouts does not use them."""
    for where, item, _, value in iter_fields(config):
        users = USED_ONLY_BY.get(where, ())
        if value == item.default:
            continue
        if users and not {config.algorithm, kind} & set(users):
            use = "uses" if len(users) == 1 else "use"
            raise ConfigError(
                f"{where} is set, but only {' and '.join(users)} {use} it: take it out, or choose {or_list(users)}"
            )
        if kind and NOT_USED_BY.get(where) == kind:
            raise ConfigError(f"{where} is set, but {kind} do not use it: take it out")


def _check_sampling(sampling: SamplingConfig, algorithm: str) -> None:
    if algorithm not in NOT_BY_GROUP and sampling.group_size == 1 and not isinstance(sampling.group_size, bool):
        raise ConfigError(
            "sampling.group_size is 1, but rollouts are compared with the others of their group, and a group of one "
            "has nothing to compare with; set group_size to 2 or more"
        )
    if is_a(sampling.temperature, float) and sampling.temperature <= 0:
        raise ConfigError(
            f"sampling.temperature is {sampling.temperature}: it must be above 0, because greedy rollouts of one "
            "prompt are all the same, so a group has no advantages; 1.0 is usual"
        )


def _check_minimum(sampling: SamplingConfig) -> None:
    if sampling.min_new_tokens >= sampling.max_new_tokens:
        raise ConfigError(
            f"sampling.min_new_tokens is {sampling.min_new_tokens} and sampling.max_new_tokens "
            f"{sampling.max_new_tokens}: no completion could end before the limit; lower the first or raise the second"
        )


def _check_loss(loss: LossBase, algorithm: str) -> None:
    for name in ("clip_low", "clip_high", "dual_clip"):
        if algorithm in WITHOUT_RATIO and getattr(loss, name) is not None:
            raise ConfigError(f"loss.{name} is set, but {algorithm} does not clip: take it out, or choose grpo")
    if is_a(loss.dual_clip, float) and loss.dual_clip is not None and loss.dual_clip <= 1:
        raise ConfigError(
            f"loss.dual_clip is {loss.dual_clip}: it bounds the ratio of negative advantages from above and must be "
            "above 1 (3.0 is usual); leave it out to turn it off"
        )


def _check_epochs(update: UpdateBase, algorithm: str) -> None:
    if algorithm in WITHOUT_RATIO and update.epochs > 1:
        raise ConfigError(
            f"update.epochs is {update.epochs}, but {algorithm} has no ratio, so only the first pass over the rollouts "
            "is on-policy: set epochs to 1, or choose grpo"
        )


def _check_critic_warmup(config: RunConfig | ControlConfig) -> None:
    warmup, steps = config.update.critic_warmup_steps, config.steps
    if warmup >= steps:
        raise ConfigError(
            f"update.critic_warmup_steps ({warmup}) must be below the run's {steps} steps, because only the critic is "
            "trained in them: set it lower, or steps higher"
        )


def _check_minibatches(sampling: SamplingConfig, update: UpdateConfig) -> None:
    prompts, parts = sampling.prompts_per_step, update.minibatches
    if prompts % parts:
        raise ConfigError(
            f"sampling.prompts_per_step ({prompts}) cannot be split evenly into update.minibatches ({parts}); "
            f"set minibatches to {largest_divisor(prompts, parts)}, or prompts_per_step to a multiple of {parts}"
        )


def largest_divisor(count: int, most: int) -> int:
    """The largest number up to `most` that divides `count`."""
    return next(n for n in range(min(most, count), 0, -1) if count % n == 0)


def _check_evaluation(evaluation: EvaluationConfig) -> None:
    limits = evaluation.token_limits
    if len(set(limits)) != len(limits):
        raise ConfigError(f"evaluation.token_limits names a limit twice: {toml_repr(limits)}")


def _check_held_out(config: RunConfig | ControlConfig) -> None:
    """Refuse options that follow the held-out score if it is not measured during training."""
    given = {"evaluation.patience": config.evaluation.patience, "checkpoint.best": config.checkpoint.best}
    for name, value in given.items():
        if value and not config.evaluation.every:
            raise ConfigError(f"{name} follows the evaluations during training: set evaluation.every, such as 10")


def check_task(task: Any) -> None:
    """Refuse a task table whose data file cannot be read.

    Raises:
        ConfigError: for a data file that is missing or not named, and for a missing package.
    """
    if isinstance(task, ReasoningGymConfig):
        check_reasoning_gym(task)
    if not isinstance(task, DatasetConfig):
        return
    if not task.path:
        raise ConfigError('the dataset task needs a file: set path = "prompts.jsonl" in [task]')
    for name, value in (("path", task.path), ("held_out_path", task.held_out_path)):
        if value:
            check_data(value, f"task.{name}")
