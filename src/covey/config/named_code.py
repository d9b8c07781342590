"""The code that a recipe names, for `covey check`, which tells it before any of it runs."""

from __future__ import annotations

from collections.abc import Iterator

from covey.config.control import ControlConfig
from covey.config.conversation import BUILT_IN_ENVIRONMENTS
from covey.config.files import user_path
from covey.config.llm import RunConfig
from covey.config.named_modules import find_module, place_of


def named_code(config: RunConfig | ControlConfig) -> list[str]:
    """One line for each function, class or module that a run of the config runs, with its file.

    Raises:
        ConfigError: for a module that a recipe cannot name.
    """
    lines = []
    for where, name, library in _names(config):
        source, _, function = name.rpartition(":")
        found = None if source.endswith(".py") else find_module(source, where, library)
        file = place_of(found) if found else user_path(source).absolute()
        lines.append(f"{where} runs {function or source} of {file}")
    return lines


def _names(config: RunConfig | ControlConfig) -> Iterator[tuple[str, str, str]]:
    """Field, name and library of what the config names."""
    if isinstance(config, ControlConfig):
        if ":" in config.environment.id:
            yield "environment.id", config.environment.id.rpartition(":")[0] + ":", "gymnasium"
        return
    for number, reward in enumerate(config.rewards, start=1):
        if reward.function:
            yield f"[[rewards]] number {number}", reward.function, "covey"
    if ":" in config.process.boundary:
        yield "process.boundary", config.process.boundary, "covey"
    conversation = config.conversation
    if ":" in conversation.source and conversation.environment not in BUILT_IN_ENVIRONMENTS:
        yield "conversation.environment", conversation.source, "covey"
    module, library = conversation.imported_module
    if module:
        yield "conversation.environment", f"{module}:", library
