"""What cannot work is refused here, in one line that names the fix, before anything heavy is loaded."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from covey.config import (
    EMBEDDED_MODELS,
    TASK_CONFIGS,
    ConfigError,
    ControlConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JsonlConfig,
    LossBase,
    RewardConfig,
    RolloutsConfig,
    RunConfig,
    SamplingConfig,
    UpdateBase,
    UpdateConfig,
)

TYPE_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
WITHOUT_RATIO = ("rloo", "reinforce")  # nothing to clip, nothing that corrects for a policy that has moved
# Control: fields that only one algorithm or one kind of group uses; setting them elsewhere would change nothing.
USED_ONLY_BY = {
    "policy.critic_hidden": "ppo",
    "loss.value_coefficient": "ppo",
    "loss.value_clip": "ppo",
    "loss.gae_lambda": "ppo",
    "loss.whiten": "ppo",
    "update.critic_learning_rate": "ppo",
    "update.critic_epochs": "ppo",
    "rollouts.fragment_steps": "fragments",
    "rollouts.horizon": "branches",
    "rollouts.compare": "reward_to_go",
}
NOT_USED_BY = {
    "rollouts.starts_per_step": "fragments",
    "rollouts.group_size": "fragments",
    "rollouts.environments": "branches",
}
LIST_NAMES = {int: "a list of integers", float: "a list of numbers", str: "a list of texts"}


def validate(config: RunConfig | ControlConfig, *, own_task: bool = False) -> None:
    """Refuse a run that cannot work: wrong types, values out of range, combinations that contradict each other.

    Reads the file system (does the data file exist?) but loads no model, makes no environment and calls nobody's code.
    With `own_task` the task comes from a script, and the config needs none.

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    if isinstance(config, ControlConfig):
        _validate_control(config)
    else:
        _validate_language(config, own_task)


def _validate_language(config: RunConfig, own_task: bool) -> None:
    if config.task is None and not own_task:
        raise ConfigError(
            f'no task: add a [task] table with name = "arithmetic" (or {either(list(TASK_CONFIGS)[1:])}), '
            'or for control an [environment] table with id = "CartPole-v1"'
        )
    if config.task is not None and type(config.task) not in TASK_CONFIGS.values():
        raise ConfigError(f"task must be one of the task configs in covey.config (is {type(config.task).__name__})")
    _check_sampling(config.sampling)  # first, because its messages say why
    _check_loss(config.loss, config.algorithm)
    check_fields(config)
    _check_epochs(config.update, config.algorithm)
    _check_minibatches(config.sampling, config.update)
    _check_evaluation(config.evaluation)
    check_task(config.task)
    for number, reward in enumerate(config.rewards, start=1):
        check_reward(reward, f"[[rewards]] number {number}")
    if sum(reward.score for reward in config.rewards) > 1:
        raise ConfigError("several [[rewards]] have score = true: evaluation counts one of them, so keep one")
    check_model(config.model)


def _validate_control(config: ControlConfig) -> None:
    if not config.environment.id:
        raise ConfigError('no environment: give the table [environment] an id, such as id = "CartPole-v1"')
    _check_loss(config.loss, config.algorithm)
    check_fields(config)
    rollouts = config.rollouts
    _check_groups(rollouts, config.algorithm)
    _check_epochs(config.update, config.algorithm)
    _check_vectorization(config.environment, rollouts.groups)
    parts, count = config.update.minibatches, rollouts.fragment_steps * rollouts.copies
    if rollouts.groups == "fragments" and count % parts:
        raise ConfigError(
            f"the decisions of rollouts.fragment_steps x copies ({count}) cannot be split evenly into "
            f"update.minibatches ({parts}); set minibatches to {_largest_divisor(count, parts)}"
        )
    for where, item, _, value in leaves(config):
        user = USED_ONLY_BY.get(where)
        if value == item.default:
            continue
        if user not in (None, config.algorithm, rollouts.groups):
            raise ConfigError(f"{where} is set, but only {user} uses it: take it out, or choose {user}")
        if NOT_USED_BY.get(where) == rollouts.groups:
            raise ConfigError(f"{where} is set, but {rollouts.groups} has no use for it: take it out")


def check_fields(config: Any, prefix: str = "") -> None:
    """Every plain value below a config dataclass against its type, its choices and its limits.

    Raises:
        ConfigError: naming the first field, with `prefix`, that holds what it may not.
    """
    for where, item, hint, value in leaves(config, prefix):
        _check_value(where, item, hint, value)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any, Any]]:
    """Every plain value below a config dataclass: (dotted name, field, type hint, value)."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        name = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{name}.")
        elif item.name == "rewards" and not prefix:
            for number, reward in enumerate(value, start=1):
                yield from leaves(reward, f"rewards[{number}].")
        elif hints[item.name] is not Any:  # Any is a task, which a script may bring instead
            yield name, item, hints[item.name], value


def plain_type(hint: Any) -> tuple[type, bool, bool]:
    """What a field holds: (the type of a single value, is it a list of them, may it be unset)."""
    arguments = [argument for argument in get_args(hint) if argument not in (type(None), Ellipsis)]
    optional = type(None) in get_args(hint)
    is_list = getattr(hint, "__origin__", None) is tuple
    return (arguments[0] if arguments else hint), is_list, optional


def describe_type(hint: Any) -> str:
    """The type in words: 'an integer', 'a list of integers'."""
    kind, is_list, _ = plain_type(hint)
    return LIST_NAMES[kind] if is_list else TYPE_NAMES.get(kind, f"a {kind.__name__}")


def did_you_mean(word: str, known: list[str]) -> str:
    """' (did you mean ...?)' with the nearest known word, or '' where none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""


def either(words: list[str] | tuple[str, ...]) -> str:
    """'a, b or c'."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _check_value(where: str, item: Field[Any], hint: Any, value: Any) -> None:
    """One value against the type, the choices and the limits of its field."""
    kind, is_list, optional = plain_type(hint)
    if value is None and optional:
        return
    if is_list and not isinstance(value, tuple):
        raise ConfigError(f"{where} must be {describe_type(hint)} (is {value!r})")
    if is_list and not value and item.default != ():
        raise ConfigError(f"{where} is empty: give at least one value, or leave it out")
    for single in value if is_list else (value,):
        if not _is_a(single, kind):
            raise ConfigError(f"{where} must be {describe_type(hint)} (is {_shown(value)})")
        if kind is float and not math.isfinite(single):
            raise ConfigError(f"{where} must be a finite number (is {single})")
        if kind is str and not single.isascii() and single.encode("utf-8", "replace").decode() != single:
            raise ConfigError(f"{where} holds characters that are no valid text: {single!r}")
        choices = item.metadata["choices"]
        optional_text = kind is str and single == "" == item.default
        if choices and single not in choices and not optional_text:
            raise ConfigError(f"{where} must be {either(choices)} (is {single!r}){did_you_mean(str(single), choices)}")
        check_limits(where, item.metadata["limits"], single)


def check_limits(where: str, limits: dict[str, float | None], value: Any) -> None:
    """A number against the limits that `covey.config.option` noted.

    Raises:
        ConfigError: naming the limit that the value breaks.
    """
    least, most, above, below = (limits[name] for name in ("least", "most", "above", "below"))
    if least is not None and value < least:
        raise ConfigError(f"{where} must be at least {least:.12g} (is {value})")
    if most is not None and value > most:
        raise ConfigError(f"{where} must be at most {most:.12g} (is {value})")
    if above is not None and value <= above:
        raise ConfigError(f"{where} must be above {above:.12g} (is {value})")
    if below is not None and value >= below:
        raise ConfigError(f"{where} must be below {below:.12g} (is {value})")


def _is_a(value: Any, kind: type) -> bool:
    """Strict: a bool is not a number, an integer is a fine number, nothing else is converted."""
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _shown(value: Any) -> str:
    """A value as TOML would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def _check_sampling(sampling: SamplingConfig) -> None:
    if sampling.group_size == 1 and not isinstance(sampling.group_size, bool):
        raise ConfigError(
            "sampling.group_size is 1: rollouts learn by comparison with their group, and a group of one has nothing "
            "to compare with; set group_size to 2 or more"
        )
    if sampling.top_p != 1:
        raise ConfigError(
            f"sampling.top_p is {sampling.top_p}: while training it must stay 1.0, because the log-probabilities of "
            "the update are those of the whole distribution; lower the temperature instead"
        )
    if sampling.top_k != 0:
        raise ConfigError(
            f"sampling.top_k is {sampling.top_k}: while training it must stay 0, because the log-probabilities of "
            "the update are those of the whole distribution; lower the temperature instead"
        )
    if _is_a(sampling.temperature, float) and sampling.temperature <= 0:
        raise ConfigError(
            f"sampling.temperature is {sampling.temperature}: it must be above 0, because greedy rollouts of one "
            "prompt are all the same and a group then teaches nothing; 1.0 is usual"
        )


def _check_loss(loss: LossBase, algorithm: str) -> None:
    for name in ("clip_low", "clip_high", "dual_clip"):
        if algorithm in WITHOUT_RATIO and getattr(loss, name) is not None:
            raise ConfigError(f"loss.{name} is set, but {algorithm} does not clip: take it out, or choose grpo")
    if _is_a(loss.dual_clip, float) and loss.dual_clip is not None and loss.dual_clip <= 1:
        raise ConfigError(
            f"loss.dual_clip is {loss.dual_clip}: it bounds the ratio of negative advantages from above and must be "
            "above 1 (3.0 is usual); leave it out to turn it off"
        )


def _check_epochs(update: UpdateBase, algorithm: str) -> None:
    if algorithm in WITHOUT_RATIO and update.epochs > 1:
        raise ConfigError(
            f"update.epochs is {update.epochs}, but {algorithm} has no ratio, and without one only the first pass over "
            "some rollouts is on-policy: set epochs to 1, or choose grpo"
        )


def _check_minibatches(sampling: SamplingConfig, update: UpdateConfig) -> None:
    prompts, parts = sampling.prompts_per_step, update.minibatches
    if prompts % parts:
        raise ConfigError(
            f"sampling.prompts_per_step ({prompts}) cannot be split evenly into update.minibatches ({parts}); "
            f"set minibatches to {_largest_divisor(prompts, parts)}, or prompts_per_step to a multiple of {parts}"
        )


def _largest_divisor(count: int, most: int) -> int:
    return max(n for n in range(1, min(most, count) + 1) if count % n == 0)


def _check_groups(rollouts: RolloutsConfig, algorithm: str) -> None:
    groups, size = rollouts.groups, rollouts.group_size
    if (algorithm == "ppo") != (groups == "fragments"):
        raise ConfigError(
            f"algorithm {algorithm!r} does not go with rollouts.groups {groups!r}: ppo learns from fragments, with a "
            "critic, and the other algorithms from groups; set both"
        )
    if groups == "within_episode" and size != 1:
        raise ConfigError(
            f"rollouts.group_size is {size}: within_episode compares the steps of one episode with each other, so a "
            "group is one episode; set group_size to 1 (and starts_per_step to the episodes of a step)"
        )
    if groups not in ("within_episode", "fragments") and size == 1:
        raise ConfigError(
            f"rollouts.group_size is 1: {groups} learns by comparison with the group, and a group of one has nothing "
            "to compare with; set group_size to 2 or more"
        )


def _check_vectorization(environment: EnvironmentConfig, groups: str) -> None:
    if environment.autoreset != "disabled" and groups != "fragments":
        raise ConfigError(
            f"environment.autoreset is {environment.autoreset!r}, with which only fragments can be sampled: {groups} "
            "needs episodes that begin from chosen seeds; set it to 'disabled'"
        )
    if groups == "branches" and environment.vectorization not in ("auto", "sync"):
        raise ConfigError(
            f"environment.vectorization is {environment.vectorization!r}, but branches copy the environment's state, "
            "which needs the environment in this process; set it to 'auto' or 'sync'"
        )


def _check_evaluation(evaluation: EvaluationConfig) -> None:
    limits = evaluation.token_limits
    if len(set(limits)) != len(limits):
        raise ConfigError(f"evaluation.token_limits names a limit twice: {_shown(limits)}")


def check_task(task: Any) -> None:
    """The rules of one task's table that go beyond single values.

    Raises:
        ConfigError: for a data file that is missing or not named.
    """
    if not isinstance(task, JsonlConfig):
        return
    if not task.path:
        raise ConfigError('the jsonl task needs a file: set path = "prompts.jsonl" in [task]')
    for name, value in (("path", task.path), ("held_out_path", task.held_out_path)):
        path = Path(value).expanduser()
        if value and path.is_dir():
            raise ConfigError(f"task.{name}: {value} is a folder; name a JSONL file")
        if value and not path.is_file():
            raise ConfigError(f"task.{name}: there is no file {value}{did_you_mean_file(path)}")


def check_reward(reward: RewardConfig, where: str) -> None:
    """The rules of one [[rewards]] table; `where` names it in the message.

    Raises:
        ConfigError: for neither or both of name and function, a bad pattern, a function that is no file.py:function.
    """
    if bool(reward.name) == bool(reward.function):
        wrong = "both name and function" if reward.name else "neither name nor function"
        raise ConfigError(f"{where} has {wrong}: give exactly one of them")
    if reward.weight == 0:
        raise ConfigError(f"{where} has weight 0 and so changes nothing: give it a weight or take it out")
    if reward.name == "format" and not reward.pattern:
        raise ConfigError(f"{where} is a format reward and needs a pattern, such as pattern = '-?[0-9]+'")
    if reward.name != "format" and reward.pattern:
        raise ConfigError(f"{where} has a pattern, which only the format reward uses: take it out")
    try:
        re.compile(reward.pattern)
    except re.error as error:
        raise ConfigError(f"{where}: pattern {reward.pattern!r} is no regular expression ({error})") from error
    if reward.function:
        _check_function_name(reward.function, where)


def _check_function_name(function: str, where: str) -> None:
    """`file.py:function` or `module:function`; the file must exist, a module is looked up when it is imported."""
    source, _, name = function.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"{where}: function must be file.py:function or module:function (is {function!r})")
    path = Path(source).expanduser()
    if source.endswith(".py") and not path.is_file():
        raise ConfigError(f"{where}: there is no file {source}{did_you_mean_file(path)}")
    if not source.endswith(".py") and os.sep in source:
        raise ConfigError(f"{where}: {source} is no Python file; a file's name ends with .py")


def check_model(model: str) -> None:
    """A model that names a file or folder must be there; a hub name must look like one.

    Raises:
        ConfigError: naming what is missing.
    """
    path = Path(model).expanduser()
    if model in EMBEDDED_MODELS:
        return
    if path.is_dir():
        if not any((folder / "config.json").is_file() for folder in (path, path / "model")):  # or a run's folder
            raise ConfigError(f"model: the folder {model} has no config.json, so it is no Hugging Face model")
        return
    is_gguf = model.endswith(".gguf")
    if is_gguf and not path.is_file():
        raise ConfigError(f"model: there is no file {model}{did_you_mean_file(path)}")
    if is_gguf:
        return
    if path.is_file():
        raise ConfigError(f"model: {model} is a file; give the model's folder, a hub name or a .gguf file")
    if model.startswith((".", "~", os.sep)) or model.endswith(os.sep) or model.count("/") > 1:
        raise ConfigError(f"model: there is no folder {model}{did_you_mean_file(path)}")
    suggestion = did_you_mean(model.lower(), list(EMBEDDED_MODELS))
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or ("/" not in model and suggestion):
        raise ConfigError(f"model: {model!r} is no embedded model, folder, .gguf file or hub name{suggestion}")


def did_you_mean_file(path: Path) -> str:
    """' (did you mean ...?)' with a neighbour of a file that is not there."""
    try:
        neighbours = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    near = did_you_mean(path.name, neighbours)
    return near.replace("mean '", f"mean '{path.parent}{os.sep}") if near and str(path.parent) != "." else near
