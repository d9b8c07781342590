"""Validates the field `trackers`, without loading a tracker's package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from covey.config.common import ConfigError


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is named twice, and one whose package is missing.

    Raises:
        ConfigError: naming the tracker and the fix.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"trackers has {name} twice: take one out")
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of this name in the working folder is no package
            raise ConfigError(f'trackers: {name} needs a package: pip install "covey[{name}]"')
