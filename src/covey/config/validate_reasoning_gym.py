"""Validates the task reasoning_gym, without loading the package."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from typing import Any

from covey.config.common import ConfigError
from covey.config.files import shortened

OF_COVEY = ("seed", "size")  # options that the task sets


def check_reasoning_gym(config: Any) -> None:
    """Refuse options that cannot be read, and a missing package.

    Raises:
        ConfigError: naming the field and the fix.
    """
    options_of(config)
    if find_spec("reasoning_gym") is None:
        raise ConfigError('the task reasoning_gym needs a package: pip install "covey[reasoning-gym]"')


def options_of(config: Any) -> dict[str, Any]:
    """Name -> value of `options`. Raises ConfigError for an entry that is no TOML assignment."""
    found: dict[str, Any] = {}
    for entry in config.options:
        try:
            pairs = tomllib.loads(entry)
        except tomllib.TOMLDecodeError:
            pairs = {}
        if len(pairs) != 1 or "\n" in entry or any(isinstance(value, dict) for value in pairs.values()):
            raise ConfigError(
                f'task.options has {shortened(entry)}: an option is a name and its value in TOML, "max_animals = 4" '
                "or 'level = \"easy\"'"
            )
        [(name, value)] = pairs.items()
        if name in OF_COVEY:
            raise ConfigError(f"task.options has {name}, which covey sets itself: take it out")
        if name in found:
            raise ConfigError(f"task.options has {name} twice")
        found[name] = value
    return found
