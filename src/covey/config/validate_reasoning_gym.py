"""Validates the task reasoning_gym, without loading the package."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from covey.config.common import ConfigError
from covey.config.toml_options import toml_assignments

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
    found = toml_assignments(config.options, "task.options")
    for name in OF_COVEY:
        if name in found:
            raise ConfigError(f"task.options has {name}, which covey sets itself: take it out")
    return found
