"""Checks of single values: type, choices and limits of their config field."""

import difflib
import math
import os
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from functools import cache
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, get_args
from typing import get_type_hints as uncached_type_hints

from covey.config.common import ConfigError
from covey.config.files import unusual_kind
from covey.config.machine import torchrun_words

LARGEST_INTEGER = 2**31 - 1  # limit of an integer field that declares none
LARGEST_NUMBER = 1e30  # limit of a field's absolute value, which fp32 can represent
LONGEST_TEXT = 10_000  # characters of a field
LONGEST_LIST = 1000  # values of a field

TRAININGS = (("train",), ("sft",), ("reward-model", "train"))  # commands that several ranks can execute

TYPE_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
LIST_NAMES = {int: "a list of integers", float: "a list of numbers", str: "a list of texts"}


@cache
def get_type_hints(kind: Any) -> dict[str, Any]:
    """`typing.get_type_hints`, cached because it evaluates every annotation again."""
    return uncached_type_hints(kind)


def plural(count: int, noun: str) -> str:
    """'1 problem', '1,024 problems'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def check_fields(config: Any, prefix: str = "") -> None:
    """Check every plain value below a config dataclass against its type, its choices and its limits.

    Raises:
        ConfigError: naming the first field, with `prefix`, that has an invalid value.
    """
    for where, item, hint, value in iter_fields(config, prefix):
        check_value(where, item, hint, value)


def iter_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any, Any]]:
    """Iterate over the plain values below a config dataclass: (dotted name, field, type hint, value)."""
    kind: Any = type(config)
    hints = get_type_hints(kind)
    for item in fields(config):
        value = getattr(config, item.name)
        name = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from iter_fields(value, f"{name}.")
        elif item.name == "rewards" and not prefix:
            for number, reward in enumerate(value, start=1):
                yield from iter_fields(reward, f"rewards[{number}].")
        elif hints[item.name] is not Any:  # Any is the task, which a script may provide itself
            yield name, item, hints[item.name], value


def plain_type(hint: Any) -> tuple[type, bool, bool]:
    """Type of a field: (type of a single value, whether it is a list of them, whether it may be unset)."""
    arguments = [argument for argument in get_args(hint) if argument not in (type(None), Ellipsis)]
    optional = type(None) in get_args(hint)
    is_list = getattr(hint, "__origin__", None) is tuple
    return (arguments[0] if arguments else hint), is_list, optional


def describe_type(hint: Any) -> str:
    """The type in words: 'an integer', 'a list of integers'."""
    kind, is_list, _ = plain_type(hint)
    return LIST_NAMES[kind] if is_list else TYPE_NAMES.get(kind, f"a {kind.__name__}")


def command(*words: object) -> str:
    """A command line of covey, quoted for a shell, as messages name it; a training of several ranks by torchrun."""
    is_training = words[:1] in TRAININGS or words[:2] in TRAININGS
    return shlex.join([*(torchrun_words() if is_training else ()), "covey", *map(str, words)])


def did_you_mean(word: str, known: list[str], likeness: float = 0.6) -> str:
    """' (did you mean ...?)' with the nearest known word, or '' if none has a similarity of `likeness` (0 to 1)."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=likeness)
    return f" (did you mean '{near[0]}'?)" if near else ""


def or_list(words: list[str] | tuple[str, ...]) -> str:
    """'a, b or c'."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def check_value(where: str, item: Field[Any], hint: Any, value: Any) -> None:
    """Check one value against the type, the choices and the limits of its field."""
    kind, is_list, optional = plain_type(hint)
    if value is None and optional:
        return
    if is_list and not isinstance(value, tuple):
        raise ConfigError(f"{where} must be {describe_type(hint)} (is {value!r})")
    if is_list and not value and item.default != ():
        raise ConfigError(f"{where} is empty: give at least one value, or leave it out")
    if is_list and len(value) > LONGEST_LIST:
        raise ConfigError(f"{where} has {len(value):,} values: at most {LONGEST_LIST:,} are read")
    for single in value if is_list else (value,):
        if not is_a(single, kind):
            raise ConfigError(f"{where} must be {describe_type(hint)} (is {toml_repr(value)})")
        if type(single) is int and single.bit_length() > 64:
            raise ConfigError(f"{where} is an integer of more than 64 bits")
        if kind is float and not math.isfinite(single):
            raise ConfigError(f"{where} must be a finite number (is {single})")
        if kind is str:
            check_text(single, where)
        choices = item.metadata["choices"]
        optional_text = kind is str and single == "" == item.default
        if choices and single not in choices and not optional_text:
            raise ConfigError(f"{where} must be {or_list(choices)} (is {single!r}){did_you_mean(str(single), choices)}")
        check_limits(where, item.metadata["limits"], single, item.metadata["because"])
        if kind is int and item.metadata["limits"]["max"] is None and abs(single) > LARGEST_INTEGER:
            raise ConfigError(f"{where} must be at most {LARGEST_INTEGER} (is {single})")
        if kind is float and abs(single) > LARGEST_NUMBER:
            raise ConfigError(f"{where} must be at most {LARGEST_NUMBER:g} (is {single})")


def check_limits(where: str, limits: dict[str, float | None], value: Any, because: str = "") -> None:
    """Check a number against the limits that `covey.config.config_field` declared.

    Raises:
        ConfigError: naming the limit that the value breaks, and the reason for it.
    """
    breaks = {"min": ("at least", lt), "max": ("at most", gt), "above": ("above", le), "below": ("below", ge)}
    for name, (words, broken) in breaks.items():
        if (limit := limits[name]) is not None and broken(value, limit):
            reason = f", because {because}" if because else ""
            raise ConfigError(f"{where} must be {words} {limit:.12g} (is {value}){reason}")


def check_text(text: str, where: str) -> None:
    """Refuse text that is unsafe in a file or terminal: control characters, surrogates, or more than LONGEST_TEXT.

    Raises:
        ConfigError: beginning with `where`, which names the field.
    """
    if len(text) > LONGEST_TEXT:
        raise ConfigError(f"{where} has {len(text):,} characters: at most {LONGEST_TEXT:,} are read")
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise ConfigError(f"{where} holds characters that are not valid text: {text!r}")
    if any(unicodedata.category(character) == "Cc" and character not in "\n\t" for character in text):
        raise ConfigError(f"{where} holds control characters: {text!r}; only line ends and tabs may be among them")


def printable(text: str) -> str:
    """The text with control characters, except line ends and tabs, replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def is_a(value: Any, kind: type) -> bool:
    """Strict isinstance: a bool is not a number, an integer is a float, nothing else is converted."""
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def toml_repr(value: Any) -> str:
    """The value in TOML syntax."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def did_you_mean_file(path: Path) -> str:
    """' (did you mean ...?)' with the most similar name in the folder of a missing file."""
    try:
        neighbours = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    near = did_you_mean(path.name, neighbours)
    return near.replace("mean '", f"mean '{path.parent}{os.sep}") if near and str(path.parent) != "." else near


def missing_file(path: Path, name: str) -> str:
    """Message for a path that is not a plain file: it is missing, a folder, a pipe or a device."""
    kind = unusual_kind(path)
    return f"{name} is {kind}, no file" if kind else f"there is no file {name}{did_you_mean_file(path)}"
