"""Validates the task reasoning_gym, without loading the package."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from covey.config.assignments import read_assignments
from covey.config.common import ConfigError

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
    example = '"max_animals = 4" or \'level = "easy"\''
    return read_assignments(config.options, "task.options", example=example, taken=OF_COVEY)
