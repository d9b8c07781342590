"""Validate the settings of the selection of prompts."""

from __future__ import annotations

from covey.config.common import ConfigError
from covey.config.selection import SelectionConfig


def check_selection(selection: SelectionConfig) -> None:
    """Refuse settings of [selection] that have no effect.

    Raises:
        ConfigError: naming the field and the fix.
    """
    default = SelectionConfig()
    if selection.candidates > 1:
        return
    for name in ("floor", "half_life", "back_to_data"):
        if getattr(selection, name) != getattr(default, name):
            raise ConfigError(
                f"selection.{name} is set, but selection.candidates is 1, so prompts are drawn evenly: set "
                "selection.candidates, such as 4"
            )
