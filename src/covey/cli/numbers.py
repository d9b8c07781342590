"""Options of argparse: the type of a number, and the fields of a config as options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, cast

from covey.config.fields import TYPE_NAMES, get_type_hints, plain_type
from covey.config.files import shortened


def number(kind: type, least: float, most: float) -> Callable[[str], Any]:
    """argparse type of a number: an int or a float from `least` to `most`."""

    def parse_number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {TYPE_NAMES[kind]} (is {shortened(text)})") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a finite number (is {value})")
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:.12g} (is {value})")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:.12g} (is {value})")
        return value

    return parse_number


def add_fields(group: Any, root: type, metavars: Mapping[str, str], prefix: str = "") -> None:
    """Add an option for each field of a config, with its help after `prefix`; None if it is not given."""
    for item in _options(root):
        kind, is_list, _ = plain_type(get_type_hints(root)[item.name])
        option, text = f"--{item.name.replace('_', '-')}", prefix + item.metadata["help"].replace("%", "%%")
        if kind is bool:
            group.add_argument(option, action="store_const", const=True, help=text)
            continue
        limits, choices, default = item.metadata["limits"], item.metadata["choices"], cast(Any, item.default)
        if default:
            shown = ",".join(map(str, default)) if is_list else default
            text += f" ({shown:g})" if isinstance(shown, float) else f" ({shown})"
        parsed = str if kind is str else number(kind, limits["min"], limits["max"] or 1e9)
        metavar = None if choices else metavars.get(item.name, "N")
        group.add_argument(
            option, type=_listed(parsed) if is_list else parsed, choices=choices or None, metavar=metavar, help=text
        )


def _listed(parsed: Any) -> Any:
    def parse_list(text: str) -> tuple[Any, ...]:
        return tuple(parsed(word) for word in text.split(","))

    return parse_list


def given_fields(arguments: argparse.Namespace, root: type) -> dict[str, Any]:
    """The fields of a config that were given as options."""
    values = {item.name: getattr(arguments, item.name) for item in _options(root)}
    return {name: value for name, value in values.items() if value is not None}


def _options(root: type) -> list[Field[Any]]:
    return [item for item in fields(root) if "help" in item.metadata]
