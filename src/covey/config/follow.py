"""Adjusts the recipe fields that depend on a field which the command line changes.

The fields of a recipe fit each other: a warm-up is shorter than the run, a changing group size begins at `group_size`,
a threshold belongs to its environment. If the command line changes one of them, the dependent fields that it does not
set are adjusted, so that a recipe works with every single change that is possible: those of `SCALED` by their rule, and
those that would contradict the new values (`covey.config.rules.faults`) as the contradiction says.
"""

from collections.abc import Callable, Collection
from typing import Any

from covey.config.common import ConfigError, Default
from covey.config.control import ControlConfig
from covey.config.fields import check_fields, toml_repr
from covey.config.llm import RunConfig
from covey.config.rewards import RewardConfig
from covey.config.rules import default, faults, get, put
from covey.config.tasks import TASK_CONFIGS

Config = RunConfig | ControlConfig

# Tasks in which many answers are right, so that no reward can compare with a column of right answers.
OTHER_ANSWERS = ("countdown", "code_functions", "human_eval", "guess_number", "maze")


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
    changes = _changes(recipe, config, given)
    if not changes:
        return config, ""
    causes = [
        name
        for name in given
        if _changes(recipe, put(config, name, _value_of(recipe, config, name)), {*given} - {name}) != changes
    ]
    said = [f"{name} = {_written(value)} (was {_written(get(config, name))})" for name, value in changes.items()]
    for name, value in changes.items():
        config = put(config, name, value)
    return config, f"{', '.join(map(_option, sorted({*causes} or {*given})))}: so the recipe's {', '.join(said)}"


def _changes(recipe: Config, config: Config, given: Collection[str]) -> dict[str, Any]:
    """Field -> new value of the fields that follow the given ones."""
    known = {tuple(fault.mends) for fault in faults(recipe)}  # contradictions of the recipe's own, which are refused
    before, changed = config, dict[str, Any]()
    for name, causes, value in SCALED[type(config)]:
        if name in given or {*changed, *given}.isdisjoint(causes):
            continue
        if (after := value(recipe, config, name)) != get(config, name):
            changed[name] = after
            config = put(config, name, after)
    mended: set[str] = set()
    while True:
        mends = (
            (name, default(config, name) if value is Default else value)
            for fault in faults(config)
            if tuple(fault.mends) not in known and not {*fault.subject} & {*given}
            for name, value in fault.mends.items()
        )
        mend = next(((name, value) for name, value in mends if name not in mended and name not in given), None)
        if mend is None:
            return {name: value for name, value in changed.items() if value != get(before, name)}
        mended.add(mend[0])
        changed[mend[0]] = mend[1]
        config = put(config, *mend)


def _option(name: str) -> str:
    """The short command-line option of a field."""
    return f"--{name.removesuffix('.id').rpartition('.')[2].replace('_', '-')}"


def _value_of(recipe: Config, config: Config, name: str) -> Any:
    """The recipe's value of a field, the default if its task does not have the field."""
    try:
        return get(recipe, name)
    except AttributeError:
        return default(config, name)


def _written(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple) and all(isinstance(item, RewardConfig) for item in value):
        words = (reward.name or reward.function or reward.judge or reward.model for reward in value)
        return f"[{', '.join(words)}]"
    return toml_repr(value)


def _unset(recipe: Config, config: Config, name: str) -> Any:
    return default(config, name)


def _scaled_steps(recipe: Config, config: Config, name: str) -> int:
    """Scale a number of steps with the length of the run if it no longer fits."""
    value, interval = int(get(config, name)), name.endswith("every")
    fits = value <= config.steps if interval else value < config.steps
    if fits or value >= recipe.steps or value == default(config, name):
        return value
    return max(int(interval), min(config.steps - 1, round(value * config.steps / recipe.steps)))


def _scaled_budget(recipe: RunConfig, config: RunConfig, name: str) -> int:
    """Scale the token budget with the number of steps of a longer run."""
    return max(config.token_budget, round(config.token_budget * config.steps / recipe.steps))


def _scaled_tokens(recipe: RunConfig, config: RunConfig, name: str) -> int | None:
    tokens, limit = config.sampling.overlong_tokens, config.sampling.max_new_tokens
    return tokens if tokens is None or tokens <= limit else round(tokens * limit / recipe.sampling.max_new_tokens)


def _minimum_length(recipe: RunConfig, config: RunConfig, name: str) -> int:
    """Scale the minimum length with the limit if it no longer fits."""
    minimum, limit = config.sampling.min_new_tokens, config.sampling.max_new_tokens
    return minimum if minimum < limit else minimum * limit // recipe.sampling.max_new_tokens


def _token_limits(recipe: RunConfig, config: RunConfig, name: str) -> tuple[int, ...]:
    """Keep the token limit of training among those of evaluations."""
    old, new = recipe.sampling.max_new_tokens, config.sampling.max_new_tokens
    return tuple(dict.fromkeys(new if limit == old else limit for limit in config.evaluation.token_limits))


def _rewards(recipe: RunConfig, config: RunConfig, name: str) -> tuple[RewardConfig, ...]:
    """The rewards that can grade the new task; if there are none, the task's own reward is used."""
    if recipe.task is None or config.task is None or type(recipe.task) is type(config.task):
        return config.rewards
    task = next((task for task, kind in TASK_CONFIGS.items() if kind is type(config.task)), "")
    kept = []
    for reward in config.rewards:
        tasks = reward.built_in.tasks if reward.built_in is not None else ()
        compares = not tasks and reward.built_in is not None and reward.uses("answer_column")
        if task in (*(tasks or (task,)), "dataset") and not (task in OTHER_ANSWERS and compares):
            kept.append(reward)
    return tuple(kept)


_STEPS = (
    *("update.warmup_steps", "update.critic_warmup_steps", "loss.kl_warmup_steps"),
    *("checkpoint.every", "evaluation.every"),
)
_LENGTH = ("model", "task", "task.digits", "chat.examples", "chat.system_prompt")  # change the length of answers

# (field, the fields whose change it follows, the rule), in the order in which one change may cause the next.
Rule = tuple[str, tuple[str, ...], Callable[[Any, Any, str], Any]]
SCALED: dict[type, list[Rule]] = {
    RunConfig: [
        *((name, ("steps",), _scaled_steps) for name in (*_STEPS, "reference.refresh_every")),
        ("rewards", ("task",), _rewards),
        ("token_budget", ("steps",), _scaled_budget),
        ("sampling.final_group_size", ("sampling.group_size",), _unset),
        ("sampling.overlong_tokens", ("sampling.max_new_tokens",), _scaled_tokens),
        ("sampling.min_new_tokens", _LENGTH, _unset),
        ("sampling.min_new_tokens", ("sampling.max_new_tokens",), _minimum_length),
        ("evaluation.token_limits", ("sampling.max_new_tokens",), _token_limits),
    ],
    ControlConfig: [
        *((name, ("steps",), _scaled_steps) for name in _STEPS),
        ("evaluation.expected_return", ("environment.id", "environment.max_episode_steps"), _unset),
    ],
}
