"""Fields that are lists of TOML assignments, for names that only a package or a model knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.config.common import ConfigError
from covey.config.files import parse_toml, shortened


def read_assignments(entries: Sequence[str], where: str, *, example: str, taken: Sequence[str]) -> dict[str, Any]:
    """Name -> value of the entries.

    Args:
        entries: one assignment each.
        where: name of the field, for messages.
        example: two entries in Python syntax, for messages.
        taken: names that covey sets itself.

    Raises:
        ConfigError: for an entry that is no TOML assignment, and for a name that is taken or there twice.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        fault = ""
        try:
            pairs = parse_toml(entry.encode(), "it")
        except ConfigError as error:
            pairs, fault = {}, f" ({error})"
        if len(pairs) != 1 or "\n" in entry or any(isinstance(value, dict) for value in pairs.values()):
            raise ConfigError(
                f"{where} has {shortened(entry)}: an option is a name and its value in TOML, {example}{fault}"
            )
        [(name, value)] = pairs.items()
        if name in taken:
            raise ConfigError(f"{where} has {name}, which covey sets itself: take it out")
        if name in found:
            raise ConfigError(f"{where} has {name} twice")
        found[name] = value
    return found
