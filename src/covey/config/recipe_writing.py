"""Writes configs: to nested dicts, and to TOML that `covey.config.recipe` reads back equal."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from covey.config import TASK_CONFIGS, ControlConfig, RewardConfig, RunConfig
from covey.config.reward_models import RewardModelTraining


def config_to_dict(config: RunConfig | ControlConfig | RewardModelTraining) -> dict[str, Any]:
    """The config as nested dicts of plain values, ready for TOML or JSON; unset fields are left out.

    `config_from_dict` reads it back to an equal config.
    """
    tables: dict[str, Any] = plain(config)
    if isinstance(config, RunConfig) and config.task is not None:
        tables["task"] = {"name": task_name(config.task), **plain(config.task)}
    if isinstance(config, RunConfig):
        tables["rewards"] = [_reward(reward) for reward in config.rewards]
    return tables


def first_difference(first: Any, second: Any, where: str = "") -> str:
    """The dotted name of the first value in which two nested tables differ; '' if they are equal."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            name = f"{where}.{key}" if where else str(key)
            if key not in first or key not in second:
                return name
            if found := first_difference(first[key], second[key], name):
                return found
        return ""
    return "" if first == second else where


def task_name(task: Any) -> str:
    """The name of the task with this config, as in a recipe."""
    return next(name for name, kind in TASK_CONFIGS.items() if kind is type(task))


def _reward(reward: RewardConfig) -> dict[str, Any]:
    """A [[rewards]] table without the fields of other rewards, which have their defaults."""
    unused = {
        item.name
        for item in fields(reward)
        if not reward.uses(item.name) and getattr(reward, item.name) == item.default
    }
    return {name: value for name, value in plain(reward).items() if name not in unused}


def plain(value: Any) -> Any:
    if is_dataclass(value):
        pairs = ((item.name, getattr(value, item.name)) for item in fields(value))
        return {name: plain(item) for name, item in pairs if item is not None}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def config_to_toml(config: RunConfig | ControlConfig | RewardModelTraining) -> str:
    """The config as TOML that reads back equal."""
    return _toml(config_to_dict(config))


def changes_to_toml(config: RunConfig | ControlConfig) -> str:
    """The fields whose values are not their defaults, as TOML that reads back to an equal config."""
    tables = config_to_dict(config)
    defaults = config_to_dict(type(config)())
    if "task" in tables:
        defaults["task"] = plain(type(config.task)())  # type: ignore[union-attr]
    rewards = tables.pop("rewards", ())
    changed = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            value = _without(value, defaults.get(name, {}))
        if value != {} and value != defaults.get(name):
            changed[name] = value
    return _toml(changed | {"rewards": [_without(reward, plain(RewardConfig())) for reward in rewards]})


def _without(table: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in defaults or value != defaults[name]}


def _toml(tables: dict[str, Any]) -> str:
    lines = [_line(name, value) for name, value in tables.items() if not isinstance(value, dict) and name != "rewards"]
    for name, value in tables.items():
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *(_line(key, item) for key, item in value.items())]
    for reward in tables.get("rewards", ()):
        lines += ["", "[[rewards]]", *(_line(key, item) for key, item in reward.items())]
    return "\n".join(lines) + "\n"


def write_config(config: RunConfig | ControlConfig | RewardModelTraining, path: Path) -> None:
    """Write the resolved config as TOML; `read_recipe` reads it back equal."""
    path.write_text(config_to_toml(config), encoding="utf-8")


def _line(name: str, value: Any) -> str:
    return f"{name} = {to_toml(value)}"


def to_toml(value: Any) -> str:
    """A plain value in TOML. JSON's string escapes are TOML's; unprintable characters are escaped too."""
    if isinstance(value, list):
        return f"[{', '.join(to_toml(item) for item in value)}]"
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
