"""Validate one [[rewards]] table."""

from __future__ import annotations

import re
import warnings
from dataclasses import fields
from importlib.util import find_spec

from covey.config.builtin_rewards import rewards_with, step_rewards
from covey.config.common import ConfigError
from covey.config.fields import or_list
from covey.config.files import shortened
from covey.config.function_source import check_function_name
from covey.config.llm import RunConfig
from covey.config.rewards import RewardConfig
from covey.config.validate_judge import check_judge
from covey.config.validate_reward_model import check_reward_model


def check_rewards(config: RunConfig) -> None:
    """Refuse [[rewards]] tables that contradict themselves, each other or [sampling].

    Raises:
        ConfigError: one line that names the table and the fix.
    """
    for number, reward in enumerate(config.rewards, start=1):
        where = f"[[rewards]] number {number}"
        check_reward(reward, where)
        most = config.rollout_limit
        counts_tokens = reward.name == "length" and reward.unit == "tokens" and not reward.length_both_sides
        if counts_tokens and reward.length_target >= most:
            raise ConfigError(
                f"{where}: length_target ({reward.length_target}) is not below sampling.max_new_tokens ({most}), so "
                "no completion is long enough for a penalty: set it lower"
            )
    if sum(reward.score for reward in config.rewards) > 1:
        raise ConfigError("several [[rewards]] have score = true: evaluation counts one of them, so keep one")


def check_reward(reward: RewardConfig, where: str) -> None:
    """Refuse a [[rewards]] table that contradicts itself; `where` names it in the message.

    Raises:
        ConfigError: unless it has one of name, function, judge and model; for an option that it does not take or lacks,
            a bad pattern, a function that is no file.py:function, and a judge that cannot be asked.
    """
    sources = [field for field in ("name", "function", "judge", "model") if getattr(reward, field)]
    if len(sources) != 1:
        wrong = " and ".join(sources) or "neither name nor function nor judge nor model"
        raise ConfigError(f"{where} has {wrong}: give exactly one of them")
    if reward.weight == 0 and not reward.score:
        raise ConfigError(f"{where} has weight 0 and so changes nothing: give it a weight or take it out")
    _check_options(reward, where)
    _check_pattern(reward.pattern, where)
    _check_package(reward, where)
    _check_tags(reward.tags, where)
    if reward.length_limit is not None and reward.length_limit <= reward.length_target:
        raise ConfigError(
            f"{where}: length_limit ({reward.length_limit}) must be above length_target ({reward.length_target}), "
            "because the penalty rises from the target to the limit"
        )
    if reward.function:
        check_function_name(reward.function, f"{where}: function")
    check_judge(reward, where)
    check_reward_model(reward, where)
    if reward.per_step and reward.built_in is not None and not reward.built_in.per_step:
        raise ConfigError(
            f"{where} has per_step = true, but {reward.name} pays whole completions: name a function of your own, or "
            f"{or_list(step_rewards())}"
        )
    if reward.binary and (reward.name or reward.model):
        raise ConfigError(f"{where} has binary = true, which is for functions of your own and judges: take it out")
    if reward.binary and reward.per_step:
        raise ConfigError(
            f"{where} has binary = true and per_step = true: what evaluations average of a step reward is its mean "
            "over the steps, which is no accuracy; take binary out"
        )


def _check_options(reward: RewardConfig, where: str) -> None:
    """Refuse options that the reward does not take, and a built-in reward without one that it needs."""
    taken = reward.built_in.options if reward.built_in is not None else ()
    needed = reward.built_in.required if reward.built_in is not None else {}
    for item in fields(reward):
        users = rewards_with(item.name)
        if item.name in needed and getattr(reward, item.name) == item.default:
            raise ConfigError(
                f"{where} is a {reward.name} reward and needs a value for {item.name}, such as {item.name} = "
                f"{needed[item.name]}"
            )
        if item.name == "workers" and reward.function:
            continue
        if users and item.name not in taken and getattr(reward, item.name) != item.default:
            use = "reward uses" if len(users) == 1 else "rewards use"
            raise ConfigError(f"{where} sets {item.name}, which only the {or_list(users)} {use}: take it out")


def _check_package(reward: RewardConfig, where: str) -> None:
    """Refuse a reward whose optional package is missing."""
    if reward.built_in is not None and reward.built_in.package and find_spec(reward.built_in.package) is None:
        raise ConfigError(
            f"{where}: the {reward.name} reward needs a package that is not installed: pip install "
            f'"covey[{reward.name}]"'
        )


def _check_tags(tags: tuple[str, ...], where: str) -> None:
    """Refuse tags that no completion can have in their order."""
    for tag in tags:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", tag):
            raise ConfigError(f"{where}: the tag {tag!r:.60} must be a word, such as think, without brackets")
    if len(set(tags)) < len(tags):
        raise ConfigError(f"{where}: tags names a tag twice ({', '.join(tags)}), and each may occur once")


def _check_pattern(pattern: str, where: str) -> None:
    """Refuse what the module re cannot compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets such as [[a], which are read as they stand
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{where}: pattern {shortened(pattern)} is no regular expression ({reason})") from error
