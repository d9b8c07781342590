"""Single values against the type, the choices and the limits of their config field."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from covey.config.base import ConfigError

TYPE_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
LIST_NAMES = {int: "a list of integers", float: "a list of numbers", str: "a list of texts"}


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
        if not is_a(single, kind):
            raise ConfigError(f"{where} must be {describe_type(hint)} (is {shown(value)})")
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


def is_a(value: Any, kind: type) -> bool:
    """Strict: a bool is not a number, an integer is a fine number, nothing else is converted."""
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def shown(value: Any) -> str:
    """A value as TOML would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def did_you_mean_file(path: Path) -> str:
    """' (did you mean ...?)' with a neighbour of a file that is not there."""
    try:
        neighbours = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    near = did_you_mean(path.name, neighbours)
    return near.replace("mean '", f"mean '{path.parent}{os.sep}") if near and str(path.parent) != "." else near


def check_function_name(function: str, where: str) -> None:
    """`file.py:function` or `module:function`; the file must exist, a module is looked up when it is imported.

    Raises:
        ConfigError: beginning with `where`, which names the field.
    """
    source, _, name = function.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"{where} must be file.py:function or module:function (is {function!r})")
    path = Path(source).expanduser()
    if source.endswith(".py") and not path.is_file():
        raise ConfigError(f"{where}: there is no file {source}{did_you_mean_file(path)}")
    if not source.endswith(".py") and os.sep in source:
        raise ConfigError(f"{where}: {source} is no Python file; a file's name ends with .py")
