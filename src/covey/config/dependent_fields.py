"""Adjusts the recipe fields that depend on a field which the command line changes.

The fields of a recipe fit each other: a warm-up is shorter than the run, a changing group size begins at `group_size`,
a threshold belongs to its environment. If the command line changes one of them, the dependent fields that it does not
set are adjusted, so that a recipe works with every single change that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from covey.config.builtin_rewards import BuiltInReward
from covey.config.common import ConfigError, LossBase, UpdateBase
from covey.config.control import ControlConfig
from covey.config.fields import check_fields, iter_fields, toml_repr
from covey.config.llm import RunConfig
from covey.config.rewards import RewardConfig
from covey.config.tasks import TASK_CONFIGS
from covey.config.validate import NOT_USED_BY, USED_ONLY_BY, WITHOUT_RATIO, largest_divisor
from covey.config.validate_collection import NOT_BY_GROUP
from covey.config.validate_entropy import check_controller, check_kl_cov
from covey.config.validate_process import may_pay_steps
from covey.config.validate_replay import why_not as why_not_replayed
from covey.config.validate_rewards import check_normalization

Config = RunConfig | ControlConfig

# Tasks in which many answers are right, so that no reward can compare with a column of right answers.
OTHER_ANSWERS = ("countdown", "code_functions", "human_eval", "guess_number", "maze")


@dataclass(frozen=True)
class Rule:
    """Sets `field` to `value(recipe, config, field)` if one of `causes` was changed and `field` was not given."""

    field: str
    causes: tuple[str, ...]
    value: Callable[[Any, Any, str], Any]


def follow(recipe: Config, config: Config, given: Collection[str]) -> tuple[Config, str]:
    """Adjust the fields that depend on the given fields.

    Args:
        recipe: the config in the recipe's file.
        config: the same with the fields that the command line gave.
        given: dotted names of these fields.

    Returns:
        The adjusted config, and one line that lists the changes; empty if there are none.
    """
    try:  # the rules need values of the right type; others are refused later
        check_fields(recipe)
        check_fields(config)
    except (ConfigError, TypeError):
        return config, ""
    causes = {name: {name} for name in given}  # changed field -> the given fields that caused its change
    said = []
    for rule in RULES[type(config)]:
        if rule.field in given or not causes.keys() & set(rule.causes):
            continue
        before, after = get(config, rule.field), rule.value(recipe, config, rule.field)
        if after != before:
            config = put(config, rule.field, after)
            causes[rule.field] = set().union(*(causes[name] for name in rule.causes if name in causes))
            said.append(f"{rule.field} = {_written(after)} (was {_written(before)})")
    options = sorted(set().union(*(causes[name] for name in causes if name not in given)))
    return config, f"{', '.join(map(_option, options))}: so the recipe's {', '.join(said)}" if said else ""


def _option(name: str) -> str:
    """The short command-line option of a field."""
    return f"--{name.removesuffix('.id').rpartition('.')[2].replace('_', '-')}"


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


def default(recipe: Config, config: Config, name: str) -> Any:
    """The field's default, used if the recipe does not set it."""
    section, _, leaf = name.rpartition(".")
    owner = getattr(config, section) if section else config
    return next(item.default for item in fields(owner) if item.name == leaf)


def _written(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple) and all(isinstance(item, RewardConfig) for item in value):
        words = (reward.name or reward.function or reward.judge or reward.model for reward in value)
        return f"[{', '.join(words)}]"
    return toml_repr(value)


def _if(condition: Callable[[Any], bool], then: Callable[[Any, Any, str], Any]) -> Callable[[Any, Any, str], Any]:
    """`then` if the config meets a condition; otherwise the field keeps its value."""
    return lambda recipe, config, name: then(recipe, config, name) if condition(config) else get(config, name)


def _constant(value: Any) -> Callable[[Any, Any, str], Any]:
    return lambda recipe, config, name: value


def _scaled_steps(recipe: Config, config: Config, name: str) -> int:
    """Scale a number of steps with the length of the run if it no longer fits."""
    value, interval = int(get(config, name)), name.endswith("every")
    fits = value <= config.steps if interval else value < config.steps
    if fits or value >= recipe.steps or value == default(recipe, config, name):
        return value
    return max(int(interval), min(config.steps - 1, round(value * config.steps / recipe.steps)))


def _scaled_budget(recipe: RunConfig, config: RunConfig, name: str) -> int:
    """Scale the token budget with the number of steps of a longer run."""
    return max(config.token_budget, round(config.token_budget * config.steps / recipe.steps))


def _scaled_tokens(recipe: RunConfig, config: RunConfig, name: str) -> int | None:
    tokens, limit = config.sampling.overlong_tokens, config.sampling.max_new_tokens
    if tokens is None or tokens <= limit:
        return tokens
    return round(tokens * limit / recipe.sampling.max_new_tokens)


def _minimum_length(recipe: RunConfig, config: RunConfig, name: str) -> int:
    """Scale the minimum length with the limit if it no longer fits."""
    minimum, limit = config.sampling.min_new_tokens, config.sampling.max_new_tokens
    return minimum if minimum < limit else minimum * limit // recipe.sampling.max_new_tokens


def _token_limits(recipe: RunConfig, config: RunConfig, name: str) -> tuple[int, ...]:
    """Keep the token limit of training among those of evaluations."""
    old, new = recipe.sampling.max_new_tokens, config.sampling.max_new_tokens
    return tuple(dict.fromkeys(new if limit == old else limit for limit in config.evaluation.token_limits))


def _group_sizes(config: RunConfig) -> list[int]:
    sampling = config.sampling
    return [size for size in (sampling.group_size, sampling.final_group_size) if size is not None]


def _first(recipe: RunConfig, config: RunConfig, name: str) -> int:
    if not config.sampling.adaptive:
        return int(default(recipe, config, name))
    return min(config.sampling.initial_group_size, *_group_sizes(config))


def _most(recipe: RunConfig, config: RunConfig, name: str) -> int | None:
    most = config.sampling.max_group_size
    return None if most is None or not config.sampling.adaptive else max(most, *_group_sizes(config))


def _minibatches(recipe: Config, config: Config, name: str) -> int:
    """Largest number of minibatches, up to the present one, into which the step can be split evenly."""
    if isinstance(config, ControlConfig):
        if config.rollouts.kind != "fragments":
            return config.update.minibatches
        return largest_divisor(config.rollouts.fragment_steps * config.rollouts.copies, config.update.minibatches)
    return largest_divisor(config.sampling.prompts_per_step, config.update.minibatches)


def _rewards(recipe: RunConfig, config: RunConfig, name: str) -> tuple[RewardConfig, ...]:
    """The rewards that can grade the new task; if there are none, the task's own reward is used."""
    if recipe.task is None or config.task is None or type(recipe.task) is type(config.task):
        return config.rewards
    task = next((task for task, kind in TASK_CONFIGS.items() if kind is type(config.task)), "")
    kept = []
    for reward in config.rewards:
        entry = reward.built_in or BuiltInReward(reward.function)
        if task in (*(entry.tasks or (task,)), "dataset") and not (task in OTHER_ANSWERS and entry.reads_answers):
            kept.append(reward)
    return tuple(kept)


def _iteration_steps(recipe: RunConfig, config: RunConfig, name: str) -> int | None:
    """Largest number of steps, up to the present one, that divides the run into whole iterations."""
    steps = config.iteration.steps
    return largest_divisor(config.steps, steps) if steps else None


def _has_step_rewards(config: RunConfig) -> bool:
    return any(reward.is_per_step for reward in config.rewards)


def _has_boundaries(config: RunConfig) -> bool:
    return _has_step_rewards(config) and not config.has_conversations


def _cannot_normalize_each(config: RunConfig) -> bool:
    try:
        check_normalization(config.loss, config.algorithm)
    except ConfigError:
        return True
    return False


def _cannot(check: Callable[[LossBase, UpdateBase, str], None], config: Config) -> bool:
    """True if the check of the entropy's settings refuses the config."""
    try:
        check(config.loss, config.update, config.algorithm)
    except ConfigError:
        return True
    return False


def _no_clipping(config: Config) -> bool:
    return config.algorithm in WITHOUT_RATIO


def _is_on_policy(config: Config) -> bool:
    """True if the KL is to the policy that sampled, and the single update of a step uses that policy: the KL is 0."""
    return config.loss.kl_to == "behavior" and config.update.epochs * config.update.minibatches == 1


def _no_kl(config: Config) -> bool:
    return (config.kl_coefficient if isinstance(config, RunConfig) else config.loss.kl_coefficient) == 0


def _unused(name: str) -> Callable[[Any], bool]:
    users, stranger = USED_ONLY_BY.get(name, ()), NOT_USED_BY.get(name)

    def is_unused(config: Config) -> bool:
        kind = config.rollouts.kind if isinstance(config, ControlConfig) else ""
        return (bool(users) and not {config.algorithm, kind} & set(users)) or (bool(kind) and stranger == kind)

    return is_unused


def _compares_parts_of_no_episode(config: ControlConfig) -> bool:
    """within_episode, although the rollouts are no whole episodes."""
    return config.loss.credit == "within_episode" and config.rollouts.kind != "episodes"


def _compares_one_with_none(config: ControlConfig) -> bool:
    """A group of one, although its rollouts are to be compared with each other."""
    compares_siblings = config.loss.credit != "within_episode" and config.algorithm not in NOT_BY_GROUP
    return compares_siblings and config.rollouts.group_size == 1


def _cannot_branch(config: ControlConfig) -> bool:
    return config.rollouts.kind == "branches" and config.environment.vectorization not in ("auto", "sync")


_STEPS = (
    *("update.warmup_steps", "update.critic_warmup_steps", "loss.kl_warmup_steps"),
    *("checkpoint.every", "evaluation.every"),
)
_CLIPS = ("loss.clip_low", "loss.clip_high", "loss.dual_clip")
_LENGTH = ("model", "task", "task.digits", "chat.examples", "chat.system_prompt")  # change the length of answers
_GROUP_SIZES = ("sampling.adaptive", "sampling.group_size", "sampling.final_group_size")
_ALGORITHM = ("algorithm", "rollouts.kind")
_REPLAYED = (
    *("algorithm", "loss.kl_coefficient", "loss.kl_estimator", "loss.kl_to", "iteration.steps"),
    *("loss.clip_cov_fraction", "loss.kl_cov_fraction"),
)


def _shared(root: type) -> list[Rule]:
    """Rules of both kinds of run, without those about unused fields that this kind does not have."""
    there = {where for where, *_ in iter_fields(root())}
    unused = [name for name in (*USED_ONLY_BY, *NOT_USED_BY) if name in there]
    return [
        *(Rule(name, _ALGORITHM, _if(_unused(name), default)) for name in unused),
        *(Rule(name, ("algorithm",), _if(_no_clipping, default)) for name in _CLIPS),
        Rule("update.epochs", ("algorithm",), _if(_no_clipping, _constant(1))),
        Rule("loss.credit", ("algorithm",), _if(lambda config: config.algorithm in NOT_BY_GROUP, default)),
        *(Rule(name, ("steps",), _scaled_steps) for name in _STEPS),
        Rule("replay.groups", _REPLAYED, _if(lambda config: bool(why_not_replayed(config)), default)),
        *(
            Rule(name, ("replay.groups",), _if(lambda config: not config.replay.groups, default))
            for name in ("replay.max_age", "replay.max_uses")
        ),
    ]


_KL = [
    Rule("loss.kl_coefficient", ("update.epochs", "update.minibatches"), _if(_is_on_policy, _constant(0.0))),
    Rule("loss.kl_warmup_steps", ("loss.kl_coefficient", "algorithm"), _if(_no_kl, default)),
    Rule("loss.adaptive_kl_target", ("loss.kl_coefficient", "algorithm"), _if(_no_kl, default)),
    Rule(
        "loss.adaptive_kl_horizon",
        ("loss.adaptive_kl_target",),
        _if(lambda config: config.loss.adaptive_kl_target is None, default),
    ),
]

_ENTROPY = [
    Rule(
        "loss.entropy_target",
        ("algorithm", "update.epochs", "update.minibatches", "loss.entropy_coefficient", "loss.entropy_controller"),
        _if(lambda config: _cannot(check_controller, config), default),
    ),
    *(
        Rule(name, ("loss.entropy_target",), _if(lambda config: config.loss.entropy_target is None, default))
        for name in ("loss.entropy_controller", "loss.entropy_gain", "loss.entropy_bounds")
    ),
    Rule(
        "loss.clip_cov_bounds", ("loss.clip_cov_fraction",),
        _if(lambda config: not config.loss.clip_cov_fraction, default),
    ),
    Rule(
        "loss.kl_cov_fraction", ("update.epochs", "update.minibatches", "algorithm"),
        _if(lambda config: _cannot(check_kl_cov, config), default),
    ),
    Rule(
        "loss.kl_cov_coefficient", ("loss.kl_cov_fraction",),
        _if(lambda config: not config.loss.kl_cov_fraction, default),
    ),
]  # fmt: skip

# In the order in which one change may cause the next.
RULES: dict[type, list[Rule]] = {
    RunConfig: [
        *_shared(RunConfig),
        Rule("rewards", ("task",), _rewards),
        Rule(
            "loss.credit", ("rewards", "conversation.environment"),
            _if(lambda config: not may_pay_steps(config), default),
        ),
        Rule(
            "loss.normalize_rewards", ("algorithm", "loss.credit", "loss.kl_estimator"),
            _if(_cannot_normalize_each, default),
        ),
        Rule(
            "process.boundary", ("rewards", "conversation.environment"),
            _if(lambda config: not _has_boundaries(config), default),
        ),
        Rule("token_budget", ("steps",), _scaled_budget),
        Rule("reference.refresh_every", ("steps",), _scaled_steps),
        Rule("iteration.steps", ("steps",), _iteration_steps),
        Rule(
            "reference.refresh_fraction", ("reference.refresh_every",),
            _if(lambda config: not config.reference.refresh_every, default),
        ),
        Rule("sampling.adaptive", ("algorithm",), _if(lambda config: config.algorithm in NOT_BY_GROUP, default)),
        Rule("sampling.adaptive", ("sampling.max_resamples",), _if(lambda config: config.max_resamples > 0, default)),
        Rule("sampling.max_resamples", ("algorithm",), _if(lambda config: config.algorithm in NOT_BY_GROUP, default)),
        Rule(
            "sampling.max_resamples", ("algorithm", "sampling.adaptive"),
            _if(lambda config: config.sampling.adaptive and config.max_resamples > 0, _constant(0)),
        ),
        Rule(
            "sampling.group_size", ("algorithm",),
            _if(lambda config: config.algorithm not in NOT_BY_GROUP and config.sampling.group_size == 1, default),
        ),
        Rule("sampling.final_group_size", ("sampling.group_size",), default),
        Rule("sampling.final_group_size", ("steps",), _if(lambda config: config.steps < 2, default)),
        Rule(
            "sampling.initial_group_size", _GROUP_SIZES, _first
        ),
        Rule("sampling.max_group_size", _GROUP_SIZES, _most),
        Rule("sampling.overlong_tokens", ("sampling.max_new_tokens",), _scaled_tokens),
        Rule("sampling.min_new_tokens", _LENGTH, default),
        Rule("sampling.min_new_tokens", ("sampler.kind",), _if(lambda config: config.sampler.kind == "vllm", default)),
        Rule("sampling.min_new_tokens", ("sampling.max_new_tokens",), _minimum_length),
        Rule("evaluation.token_limits", ("sampling.max_new_tokens",), _token_limits),
        Rule("update.minibatches", ("sampling.prompts_per_step",), _minibatches),
        Rule(
            "loss.kl_estimator", ("loss.kl_to",),
            _if(lambda config: (config.loss.kl_to, config.loss.kl_estimator) == ("behavior", "exact"), default),
        ),
        *_KL,
        *_ENTROPY,
    ],
    ControlConfig: [
        *_shared(ControlConfig),
        Rule("loss.credit", ("rollouts.kind",), _if(_compares_parts_of_no_episode, default)),
        Rule(
            "rollouts.group_size", ("loss.credit",),
            _if(lambda config: config.loss.credit == "within_episode", _constant(1)),
        ),
        Rule("rollouts.group_size", ("loss.credit", "algorithm"), _if(_compares_one_with_none, default)),
        Rule("environment.vectorization", ("rollouts.kind",), _if(_cannot_branch, default)),
        Rule(
            "update.minibatches",
            ("rollouts.kind", "rollouts.fragment_steps", "rollouts.environments"), _minibatches,
        ),
        Rule("evaluation.expected_return", ("environment.id", "environment.max_episode_steps"), default),
        *_KL,
        *_ENTROPY,
    ],
}  # fmt: skip
