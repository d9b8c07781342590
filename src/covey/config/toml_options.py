"""Fields of free options: a list of assignments, each as in a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from covey.config.common import ConfigError
from covey.config.files import shortened


def toml_assignments(entries: Sequence[str], where: str) -> dict[str, Any]:
    """Name -> value of a list such as ["max_animals = 4"]; `where` names the field.

    Raises:
        ConfigError: for an entry that is no TOML assignment, and a name that is given twice.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        try:
            pairs = tomllib.loads(entry)
        except tomllib.TOMLDecodeError:
            pairs = {}
        if len(pairs) != 1 or "\n" in entry or any(isinstance(value, dict) for value in pairs.values()):
            raise ConfigError(
                f'{where} has {shortened(entry)}: an option is a name and its value in TOML, "max_animals = 4" '
                "or 'level = \"easy\"'"
            )
        [(name, value)] = pairs.items()
        if name in found:
            raise ConfigError(f"{where} has {name} twice")
        found[name] = value
    return found
