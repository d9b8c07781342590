"""Rules between the tables of a config: one line refuses a run that cannot work, before anything heavy is loaded.

A rule of one table is in its class (`Table.faults`, `Table.check`). `covey.config.recipe` mends the contradictions that
the command line causes.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, cast

from covey.config.common import (
    ALGORITHM_NAMES,
    BY_GROUP,
    NOT_BY_GROUP,
    WITHOUT_RATIO,
    ConfigError,
    Default,
    Fault,
    check_shards,
    importance_cap,
    refuse,
)
from covey.config.control import ControlConfig
from covey.config.fields import check_fields, command, get_type_hints, or_list, toml_repr
from covey.config.llm import RunConfig, largest_divisor
from covey.config.machine import check_threads, refuse_above
from covey.config.model_sources import locate_model
from covey.config.rewards import RewardConfig, check_reward
from covey.config.servers import default_token_file, read_token
from covey.config.sft import SAMPLES, SFT_ALGORITHM
from covey.config.tasks import TASK_CONFIGS, EnvironmentTaskConfig

Config = RunConfig | ControlConfig

WITHOUT_CLIPPED_GRADIENT = (*WITHOUT_RATIO, "cispo")  # algorithms whose clip range removes no gradient
# Algorithms that divide by the standard deviation of a group. For the others, comparison and sum can be exchanged.
DIVIDES_BY_GROUP_STD = ("grpo", "dapo", "gspo", "cispo")
KL_IN_REWARD = ("rloo",)  # algorithms that compare within groups and have a KL in the reward by default
VERIFIER = 'a [[rewards]] table with name = "numeric", weight = 0.0 and score = true, or your own with binary = true'

ROLLOUT_BYTES = 2000  # of a rollout as Python objects, without its tokens
TOKEN_BYTES = 64  # of a sampled token: its id and its log-probability
COPY_BYTES = 1000  # of one copy of an environment
PROCESS_BYTES = 32 << 20  # of one copy of an environment in a process of its own
DECISION_BYTES = 100  # of a decision: observation, action, log-probability, reward
WEIGHT_BYTES = 24  # of a weight that is trained: itself, its master, gradient, two moments, reference
MOST_LAYERS = 100


def validate(
    config: Config,
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
        ConfigError: one line that names the field and the remedy.
    """
    _check_types(config)
    if isinstance(config, RunConfig) and config.task is None and not own_task:
        raise ConfigError(
            f'no task: add a [task] table with name = "arithmetic" (or {or_list(list(TASK_CONFIGS)[1:])}), '
            'or for control an [environment] table with id = "CartPole-v1"'
        )
    if isinstance(config, ControlConfig) and not config.environment.id:
        raise ConfigError('no environment: give the table [environment] an id, such as id = "CartPole-v1"')
    check_fields(config)
    refuse(faults(config, own_rewards=own_rewards, labels=labels))
    for _, table in _tables(config):
        table.check()
    if isinstance(config, ControlConfig):
        _check_control_size(config)
        return
    if not own_environment and config.has_conversations:
        config.conversation.check_name()
    _check_size(config)
    check_shards(config.cluster.shards, config.sampling.prompts_per_step, "sampling.prompts_per_step")
    if config.sampler.kind != "local" and not config.sampler.started and not config.sampler.token_file:
        serve = command("serve", config.model)
        read_token(default_token_file(), f"{serve} creates the access token, start it first")
    for number, reward in enumerate(config.rewards, start=1):
        check_reward(reward, f"[[rewards]] number {number}")
        refuse(_ranking(config, f"[[rewards]] number {number}") if reward.ranks else ())
    locate_model(config.model)


def validate_sft(config: RunConfig, *, resuming: bool = False) -> None:
    """Refuse a supervised training that cannot work.

    Args:
        resuming: its examples are recorded.

    Raises:
        ConfigError: one line that names the field and the remedy.
    """
    if config.algorithm == SFT_ALGORITHM:  # the config of a run of covey sft
        config = replace(config, algorithm=ALGORITHM_NAMES[0])
    check_fields(config)
    config.check()
    if not (config.sft.held_out_fraction or config.sft.held_out_path):
        for name, given in (("sft.patience", config.sft.patience), ("checkpoint.best", config.checkpoint.best)):
            if given:
                raise ConfigError(f"{name} needs held-out examples: raise sft.held_out_fraction above 0")
    refuse((*config.chat.faults(), *_unused(config, "conversation."), *_conversation(config)))
    config.chat.check()
    check_threads(config.threads)
    check_shards(config.cluster.shards, config.sft.batch_size, "sft.batch_size")
    if config.lora.is_used:
        raise ConfigError(
            "covey sft trains all weights, and [lora] asks for an adapter: give --lora.rank 0 (and remove "
            "lora.adapter); covey train can begin an adapter on the trained model"
        )
    config.conversation.check()
    if config.has_conversations:
        config.conversation.check_name()
    if not resuming:
        config.sft.check_source()
        if config.sft.data == SAMPLES:  # best checkpoint and restarts are those of the supervised training
            validate(replace(config, checkpoint=replace(config.checkpoint, best=False), schedule_restarts=()))
    locate_model(config.model)


def _check_types(config: Any) -> None:
    """Refuse values of the wrong type in place of tables, which a config from Python can have."""
    if not isinstance(config, RunConfig | ControlConfig):
        kind = type(config).__name__
        raise ConfigError(f"the config is of type {kind}: give a RunConfig or a ControlConfig, as RunConfig(steps=20)")
    tables: dict[str, Any] = get_type_hints(cast(Any, type(config)))
    for name, table in tables.items():
        value = getattr(config, name)
        if is_dataclass(table) and not isinstance(value, cast(Any, table)):
            raise ConfigError(f"{name} must be {cast(Any, table).__name__}(...) (is {toml_repr(value)})")
    if isinstance(config, ControlConfig):
        return
    if not isinstance(config.conversation.environment, str):
        raise ConfigError(
            "the environment of a config is a name, such as file.py:Class; a class or a function is given to "
            "run(config, conversation=covey.Conversation(...))"
        )
    if config.task is not None and type(config.task) not in TASK_CONFIGS.values():
        raise ConfigError(f"task must be one of the task configs in covey.config (is {type(config.task).__name__})")
    for reward in config.rewards if isinstance(config.rewards, tuple | list) else (config.rewards,):
        if not isinstance(reward, RewardConfig):
            raise ConfigError(
                f"the rewards of a config are RewardConfig(...), and one is of type {type(reward).__name__}; functions "
                "are given to run(config, rewards=[...])"
            )


def faults(config: Config, *, own_rewards: bool = False, labels: bool = False) -> Iterator[Fault]:
    """Contradictions between values of a config, each of which has its type and is within its limits.

    Args:
        own_rewards, labels: as of `validate`.
    """
    yield from _unused(config)
    for _, table in _tables(config):
        yield from table.faults()
    yield from _shared(config)
    if isinstance(config, ControlConfig):
        yield from _control(config)
        return
    yield from _groups(config)
    yield from _conversation(config)
    yield from _credit(config, other_rewards=own_rewards or labels)
    yield from _iteration(config, own_rewards=own_rewards)
    for number, reward in enumerate(config.rewards, start=1):
        counts_tokens = reward.name == "length" and reward.unit == "tokens" and not reward.length_both_sides
        if counts_tokens and reward.length_target >= config.rollout_limit:
            yield Fault(
                f"[[rewards]] number {number}: length_target ({reward.length_target}) is not below "
                f"sampling.max_new_tokens ({config.rollout_limit}), so no completion is long enough for a penalty: set "
                "it lower"
            )
    if sum(reward.score for reward in config.rewards) > 1:
        yield Fault("several [[rewards]] have score = true: evaluation counts one of them, so keep one")
    if config.sampler.kind == "vllm" and config.sampling.min_new_tokens:
        yield Fault(
            "sampling.min_new_tokens is for covey's own samplers, because vLLM's log-probabilities are those of the "
            "whole distribution: remove it, or set sampler.kind to covey",
            {"sampling.min_new_tokens": 0},
        )
    if config.lora.load_in_4bit and config.cluster.weights == "fsdp":
        yield Fault(
            'with lora.load_in_4bit every rank has all frozen weights: set cluster.weights to "replicate", or remove '
            "lora.load_in_4bit",
            {"cluster.weights": "replicate"},
        )
    if config.critic.trunk == "adapter" and not config.lora.is_used:
        yield Fault(
            'critic.trunk = "adapter" is for runs with LoRA: set lora.rank, or set critic.trunk to "own" or "policy"'
        )
    if config.algorithm == "ppo" and config.lora.is_used and config.critic.trunk == "own":
        yield Fault(
            "with LoRA a critic with all weights of its own would take the memory that LoRA saves: set critic.trunk = "
            '"adapter" (an adapter of its own on the same weights) or "policy"'
        )


def get(config: Any, name: str) -> Any:
    """The value of a field by its dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def put(config: Any, name: str, value: Any) -> Any:
    """The config with another value in the field of this dotted name."""
    section, _, leaf = name.rpartition(".")
    if section:
        return replace(config, **{section: replace(getattr(config, section), **{leaf: value})})
    return replace(config, **{leaf: value})


def default(config: Config, name: str) -> Any:
    """The field's default, used if the recipe does not set it."""
    section, _, leaf = name.rpartition(".")
    owner = getattr(config, section) if section else config
    return next(item.default for item in fields(owner) if item.name == leaf)


def _tables(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The config and its tables with the beginning of their fields' dotted names, without [[rewards]]."""
    yield prefix, config
    for item in fields(config):
        if is_dataclass(table := getattr(config, item.name)):
            yield from _tables(table, f"{prefix}{item.name}.")


def _unused(config: Config, below: str = "") -> Iterator[Fault]:
    """Fields that are set although nothing uses them, in the tables whose names begin with `below`."""
    kind = config.rollouts.kind if isinstance(config, ControlConfig) else ""
    for where, table in _tables(config):
        set_fields = {item.name: item for item in fields(table) if getattr(table, item.name) != item.default}
        for name, item in set_fields.items() if where.startswith(below) else ():
            mends = {where + name: Default}
            users, needs = (item.metadata.get(key) for key in ("used_by", "needs"))
            switches = (needs,) if needs else () if name in table.SWITCH else table.SWITCH
            switches = tuple(switch if "." in switch else where + switch for switch in switches)
            if switches and all(get(config, switch) == default(config, switch) for switch in switches):
                value = get(config, switches[0])
                yield Fault(
                    f"{where}{name} is set, but has no effect while {switches[0]} is "
                    f"{'unset' if value in (None, '') else toml_repr(value)}: set {switches[0]}, or "
                    f"remove {where}{name}",
                    mends,
                )
            if users and not {config.algorithm, kind} & set(users):
                user = config.algorithm if set(users) <= set(ALGORITHM_NAMES) else kind
                yield Fault(
                    f"{where}{name} is set, but not used with {user}: remove it, or choose {or_list(users)}", mends
                )


def _shared(config: Config) -> Iterator[Fault]:
    """Rules of both kinds of run."""
    loss, update, algorithm = config.loss, config.update, config.algorithm
    coefficient = config.kl_coefficient if isinstance(config, RunConfig) else config.loss.kl_coefficient
    once = update.epochs * update.minibatches == 1  # the policy that is updated is the one that sampled
    if algorithm in WITHOUT_RATIO and update.epochs > 1:
        yield Fault(
            f"update.epochs is {update.epochs}, but {algorithm} has no ratio, so only the first pass over the rollouts "
            "is on-policy: set epochs to 1, or choose grpo",
            {"update.epochs": 1},
        )
    if update.critic_warmup_steps >= config.steps:
        yield Fault(
            f"update.critic_warmup_steps ({update.critic_warmup_steps}) must be below the run's {config.steps} steps, "
            "because only the critic is trained in them: set it lower, or steps higher"
        )
    restarts = config.schedule_restarts
    if list(restarts) != sorted({*restarts}) or any(step >= config.steps for step in restarts):
        yield Fault(
            f"schedule_restarts ({', '.join(map(str, restarts))}) must be ascending and below the run's {config.steps} "
            "steps: remove it, or set steps higher",
            {"schedule_restarts": Default},
        )
    if loss.adaptive_kl_target is not None and not coefficient:
        yield Fault(
            "loss.adaptive_kl_target is set, but not the coefficient that it adapts: set loss.kl_coefficient above 0 "
            "(0.05 is usual)",
            {"loss.adaptive_kl_target": Default},
        )
    if loss.kl_warmup_steps and coefficient == 0:
        yield Fault(
            "loss.kl_warmup_steps is set, but kl_coefficient is 0: remove it, or set kl_coefficient",
            {"loss.kl_warmup_steps": Default},
        )
    if loss.kl_to == "behavior" and once and coefficient != 0:
        yield Fault(
            "loss.kl_to is 'behavior', but with update.epochs and update.minibatches at 1 the policy is still the "
            "one that sampled, and their KL is 0: raise one of them, or set kl_to to 'reference'",
            {"loss.kl_coefficient": 0.0},
            subject=("loss.kl_to",),
        )
    weighs = bool(loss.importance_mask) or importance_cap(loss, config.replay) is not None
    if loss.importance_level == "sequence" and not weighs:
        yield Fault(
            "loss.importance_level is 'sequence', but there are no importance weights: set importance_cap or "
            "importance_mask, or remove it"
        )
    if loss.kl_cov_fraction and once:
        yield Fault(
            "loss.kl_cov_fraction is set, but with update.epochs and update.minibatches at 1 the policy is still the "
            "one that sampled, so its penalty is 0: raise one of them, or set loss.clip_cov_fraction instead",
            {"loss.kl_cov_fraction": Default},
        )
    if loss.entropy_target is not None and loss.entropy_controller == "clip":
        yield from _adapting_the_clip_range(algorithm, once)
    if config.replay.groups:
        yield from _replayed(config)


def _adapting_the_clip_range(algorithm: str, once: bool) -> Iterator[Fault]:
    """Rules for an entropy target that the clip range follows."""
    for reason, found in {
        f"{algorithm} clips no gradients: set it to 'bonus', or choose grpo": algorithm in WITHOUT_CLIPPED_GRADIENT,
        "with update.epochs and update.minibatches at 1 every ratio is 1 and nothing is clipped: raise one of "
        "them, or set it to 'bonus'": once,
    }.items():
        if found:
            yield Fault(f"loss.entropy_controller is 'clip', but {reason}", {"loss.entropy_target": Default})


def _replayed(config: Config) -> Iterator[Fault]:
    """Rules of earlier groups in a step."""
    loss, algorithm = config.loss, config.algorithm
    for reason, found in {
        f"{algorithm} does not compare within groups, so the advantages of a rollout are those of the step that "
        "sampled it: remove it, or choose grpo": algorithm in NOT_BY_GROUP,
        "the KL is in the reward, where it is that of the policy which sampled: set loss.kl_coefficient to 0, or "
        "loss.kl_estimator to 'k3'": _kl_in_reward(config),
        "Clip-Cov and KL-Cov compare decisions of one policy, and earlier groups are of others: set "
        "loss.clip_cov_fraction and loss.kl_cov_fraction to 0, or replay.groups": (
            loss.clip_cov_fraction + loss.kl_cov_fraction > 0
        ),
        "iteration.steps trains the reward model, so earlier groups have the rewards of another one: remove one of "
        "them": isinstance(config, RunConfig) and config.iteration.steps is not None,
    }.items():
        if found:
            yield Fault(f"replay.groups is set, but {reason}", {"replay.groups": Default})


def _kl_in_reward(config: Config) -> bool:
    """True if the KL to the reference is in the reward of an algorithm that compares within groups."""
    loss = config.loss
    estimator = loss.kl_estimator or ("k1" if config.algorithm in KL_IN_REWARD else "k3")
    return estimator == "k1" and loss.kl_to == "reference" and loss.kl_coefficient != 0


def _groups(config: RunConfig) -> Iterator[Fault]:
    """How groups are collected and divided."""
    sampling, loss, algorithm = config.sampling, config.loss, config.algorithm
    prompts, parts = sampling.prompts_per_step, config.update.minibatches
    if algorithm in BY_GROUP and sampling.group_size == 1 and not config.teacher.model:
        yield Fault(
            "sampling.group_size is 1, but rollouts are compared with the others of their group, and a group of one "
            "has nothing to compare with; set group_size to 2 or more, or teacher.model to learn from a teacher alone",
            {"sampling.group_size": Default},
        )
    if prompts % parts:
        most = largest_divisor(prompts, parts)
        yield Fault(
            f"sampling.prompts_per_step ({prompts}) cannot be split evenly into update.minibatches ({parts}); "
            f"set minibatches to {most}, or prompts_per_step to a multiple of {parts}",
            {"update.minibatches": most},
        )
    if sampling.overlong_tokens is not None and sampling.overlong_tokens > config.rollout_limit:
        yield Fault(
            f"sampling.overlong_tokens ({sampling.overlong_tokens}) are the last ones of max_new_tokens "
            f"({config.rollout_limit}): set it to at most {config.rollout_limit} (a fifth is usual)"
        )
    if sampling.final_group_size is not None and config.steps < 2:
        yield Fault(
            "sampling.final_group_size is reached at the last step, and the run has one step: set steps to 2 or more, "
            "or remove it",
            {"sampling.final_group_size": Default},
        )
    if config.max_resamples and algorithm in NOT_BY_GROUP:
        yield Fault(
            f"sampling.max_resamples is set, but {algorithm} does not compare within groups, so a group whose rewards "
            "are all the same has advantages too: remove it, or choose grpo",
            {"sampling.max_resamples": Default},
        )
    if config.max_resamples and sampling.group_size == 1 and algorithm in BY_GROUP:
        yield Fault(
            f"sampling.max_resamples ({config.max_resamples}) replaces groups whose rewards are all the same, and with "
            "sampling.group_size = 1 all are: set sampling.max_resamples to 0, or group_size to 2 or more",
            {"sampling.max_resamples": 0},
        )
    if sampling.adaptive and config.max_resamples:
        yield Fault(
            f"sampling.adaptive with max_resamples = {config.max_resamples}: both say what follows a group whose "
            "rewards are all the same; set max_resamples = 0, or remove adaptive",
            {"sampling.max_resamples": 0, "sampling.adaptive": False},
        )
    if loss.kl_estimator == "exact" and loss.kl_to == "behavior":
        yield Fault(
            "loss.kl_estimator = 'exact' with kl_to = 'behavior' would need the weights that sampled beside those "
            "that learn: use 'k3', or set kl_to to 'reference'",
            {"loss.kl_estimator": Default},
        )


MOST_RANKED = 32  # completions in one question of a judge


def _ranking(config: RunConfig, where: str) -> Iterator[Fault]:
    """What a judge that compares the completions of a group does not support; `where` names its table."""
    sampling = config.sampling
    largest = max(sampling.group_size, sampling.final_group_size or 0)
    if config.algorithm in NOT_BY_GROUP:
        yield Fault(
            f"{where}: a judge with {{completions}} in its question compares the completions of a group only, and "
            f"{config.algorithm} compares groups with each other: choose grpo, or judge each {{completion}}"
        )
    if sampling.adaptive:
        yield Fault(
            f"{where}: with sampling.adaptive a group is sampled and judged in two parts, whose scores cannot be "
            "compared: remove adaptive, or judge each {completion}"
        )
    if largest > MOST_RANKED:
        yield Fault(
            f"{where}: one question has all completions of a group, at most {MOST_RANKED}, and the group size is "
            f"{largest}: lower it, or judge each {{completion}}"
        )


def _conversation(config: RunConfig) -> Iterator[Fault]:
    """What conversations do not support, and what only they support."""
    conversation = config.conversation
    if not config.has_conversations:
        users = {
            "reward": any(reward.name == "environment" for reward in config.rewards),
            "task": isinstance(config.task, EnvironmentTaskConfig),
        }
        for user, found in users.items():
            if found:
                yield Fault(f"the {user} environment is for conversations: set conversation.environment")
        return
    if config.sampling.max_new_tokens > conversation.total_tokens:
        yield Fault(
            f"sampling.max_new_tokens ({config.sampling.max_new_tokens}), the limit of one turn, is above "
            f"conversation.total_tokens ({conversation.total_tokens}), the limit of all: lower it, or raise "
            "total_tokens"
        )
    refused = {
        "evaluation.token_limits is set": bool(config.evaluation.token_limits),
        "iteration.steps is set": config.iteration.steps is not None,
        "process.boundary is set": bool(config.process.boundary),
        "a reward is a reward model": any(reward.model for reward in config.rewards),
    }
    for fault, found in refused.items():
        if found:
            mends = {"process.boundary": Default} if fault.startswith("process") else {}
            yield Fault(f"{fault}, which conversations do not support: remove it, or conversation.environment", mends)


def _credit(config: RunConfig, *, other_rewards: bool) -> Iterator[Fault]:
    """loss.credit and what it compares; with `other_rewards`, [[rewards]] does not decide whether steps are used."""
    loss = config.loss
    for reason, found in {
        f"{config.algorithm} does not divide by the deviation of a group: remove it, or choose "
        f"{or_list(DIVIDES_BY_GROUP_STD)}": config.algorithm not in DIVIDES_BY_GROUP_STD,
        f"compares whole completions, and loss.credit is {loss.credit!r}: set one of them to its default": (
            loss.credit != "outcome"
        ),
        'kl_estimator = "k1" puts the KL into the sum of the rewards: set kl_estimator = "k3"': _kl_in_reward(config),
    }.items():
        if found and loss.normalize_rewards == "each":
            yield Fault(f'loss.normalize_rewards is "each", but {reason}', {"loss.normalize_rewards": Default})
    if other_rewards:
        return
    if loss.credit != "outcome" and not may_pay_steps(config):
        yield Fault(unpaid_credit(config), {"loss.credit": Default})
    if config.process.boundary and not any(reward.is_per_step for reward in config.rewards):
        yield Fault(
            "process.boundary is set, but no reward is paid by step: remove it, or add per_step = true",
            {"process.boundary": Default},
        )


def may_pay_steps(config: RunConfig) -> bool:
    """False if no reward is paid by reasoning step, or by turn of a conversation.

    Without [[rewards]], the environment of a conversation may pay, which is known when it is loaded.
    """
    if any(reward.is_per_step for reward in config.rewards):
        return True
    return config.has_conversations and (not config.rewards or any(reward.is_per_turn for reward in config.rewards))


def unpaid_credit(config: RunConfig) -> str:
    """Message for a run that compares steps, or turns of conversations, although no reward is paid by them."""
    part, remedy = "step", "add"
    if config.has_conversations:
        part, remedy = "turn", "use an environment with step(message) and the reward environment, add"
    return (
        f"loss.credit is {config.loss.credit!r}, but no reward is paid by {part}: {remedy} [[rewards]] with per_step = "
        "true and a function, or choose credit = 'outcome'"
    )


def _iteration(config: RunConfig, *, own_rewards: bool) -> Iterator[Fault]:
    """Iterative GRPO. `covey.experiment.llm` checks rewards that a script gives."""
    steps = config.iteration.steps
    if not steps:
        return
    if config.steps % steps:
        nearest = max(1, round(config.steps / steps)) * steps
        yield Fault(
            f"steps ({config.steps}) is not a multiple of iteration.steps ({steps}), so the last iteration would be "
            f"cut short: set steps to {nearest}",
            {"iteration.steps": largest_divisor(config.steps, steps)},
        )
    if config.reference.refresh_every:
        yield Fault(
            "reference.refresh_every is set, but an iterative run copies the policy into the reference at the end of "
            "each iteration: remove it"
        )
    if config.sampler.kind != "local":
        yield Fault(
            "an iterative run generates its completions in its own process: remove sampler.kind, or iteration.steps"
        )
    models = [reward for reward in config.rewards if reward.model]
    if own_rewards:
        return
    if len(models) != 1:
        many = "are several" if models else "is none"
        yield Fault(
            f"iteration.steps is set, but an iterative run trains one reward model, and there {many}: give one "
            '[[rewards]] table model = "FOLDER"'
        )
    elif not next((reward for reward in config.rewards if reward.score), config.rewards[0]).is_binary:
        yield Fault(
            "iteration.steps is set, but an iterative run labels completions with a verifier, the reward with score = "
            f"true, which must be 1 for right and 0 for wrong: add {VERIFIER}"
        )


def _control(config: ControlConfig) -> Iterator[Fault]:
    """How the rollouts of a control run are made and compared.

    | rollouts.kind | algorithm | loss.credit |
    |---|---|---|
    | episodes | compares within groups | any; within_episode with groups of one |
    | episodes | reinforce_pp, ppo | not used |
    | branches | compares within groups | any but within_episode |
    | branches | reinforce_pp | not used |
    | fragments | ppo | not used |
    """
    rollouts, credit, algorithm = config.rollouts, config.loss.credit, config.algorithm
    if rollouts.kind == "fragments" and algorithm != "ppo":
        yield Fault(
            f"rollouts.kind is 'fragments', but algorithm {algorithm!r} has no critic to value the rest of an episode: "
            "set kind to 'episodes', or algorithm to 'ppo'"
        )
    if algorithm == "ppo" and rollouts.kind == "branches":
        yield Fault(
            "algorithm is 'ppo', but rollouts.kind is 'branches', and ppo does not compare siblings: set kind to "
            "'fragments', or algorithm to 'grpo'"
        )
    if credit == "within_episode" and rollouts.kind != "episodes":
        yield Fault(
            f"loss.credit is 'within_episode', but rollouts.kind is {rollouts.kind!r}, whose siblings it would not "
            "compare: set credit to 'outcome', or kind to 'episodes'",
            {"loss.credit": Default},
        )
    elif credit == "within_episode" and rollouts.group_size != 1:
        yield Fault(
            f"rollouts.group_size is {rollouts.group_size}, but loss.credit = 'within_episode' compares the decisions "
            "of one episode with each other: set group_size to 1 (and starts_per_step to the episodes of a step)",
            {"rollouts.group_size": 1},
        )
    if rollouts.group_size == 1 and credit != "within_episode" and algorithm in BY_GROUP:
        yield Fault(
            f"rollouts.group_size is 1, but loss.credit = {credit!r} compares the rollouts of a group with each other: "
            "set group_size to 2 or more",
            {"rollouts.group_size": Default},
        )
    if rollouts.kind == "branches" and config.environment.vectorization == "async":
        yield Fault(
            "environment.vectorization is 'async', but branches copy the environment's state, which needs the "
            "environment in this process; set it to 'auto' or 'sync'",
            {"environment.vectorization": Default},
        )
    parts, count = config.update.minibatches, rollouts.fragment_steps * rollouts.copies
    if rollouts.kind == "fragments" and count % parts:
        most = largest_divisor(count, parts)
        yield Fault(
            f"the decisions of rollouts.fragment_steps x copies ({count}) cannot be split evenly into "
            f"update.minibatches ({parts}); set minibatches to {most}",
            {"update.minibatches": most},
        )


def _check_size(config: RunConfig) -> None:
    """Refuse a run on a language model whose smallest possible memory exceeds that of the machine."""
    check_threads(config.threads)
    sampling, limit = config.sampling, config.rollout_limit
    group = max(sampling.group_size, sampling.final_group_size or 0)
    rollouts = sampling.prompts_per_step * group * (1 + config.max_resamples)
    kept = config.replay.groups * config.replay.max_age * group
    tokens = f"rollouts of {limit:,} tokens"
    for size, what, lower in (
        (ROLLOUT_BYTES * rollouts, f"a step of {rollouts:,} rollouts", "sampling.prompts_per_step, group_size"),
        (
            TOKEN_BYTES * rollouts * limit,
            f"a step of {rollouts:,} {tokens}",
            "sampling.prompts_per_step, group_size or max_new_tokens",
        ),
        (TOKEN_BYTES * kept * limit, f"a replay of {kept:,} {tokens}", "replay.groups or replay.max_age"),
    ):
        refuse_above(size, what, lower)


def _check_control_size(config: ControlConfig) -> None:
    """Refuse a run on an environment whose smallest possible memory exceeds that of the machine."""
    check_threads(config.threads)
    rollouts = config.rollouts
    own_process = config.environment.vectorization == "async"
    refuse_above(
        rollouts.copies * (PROCESS_BYTES if own_process else COPY_BYTES),
        f"{rollouts.copies:,} copies of the environment" + (" in processes of their own" if own_process else ""),
        "rollouts.environments" if rollouts.environments else "rollouts.starts_per_step, group_size",
    )
    steps = {"fragments": rollouts.fragment_steps, "branches": rollouts.horizon}.get(rollouts.kind, 1)
    count = rollouts.copies if rollouts.kind == "fragments" else rollouts.starts_per_step * rollouts.group_size
    refuse_above(count * steps * DECISION_BYTES, f"a step of {count * steps:,} decisions", "the fields of [rollouts]")
    widths = config.policy.hidden
    if len(widths) > MOST_LAYERS:
        raise ConfigError(f"policy.hidden has {len(widths):,} layers: at most {MOST_LAYERS} are trained")
    weights = sum(first * second for first, second in pairwise(widths)) + sum(widths)
    refuse_above(weights * WEIGHT_BYTES, f"a network of {weights:,} weights", "the widths in policy.hidden")
