"""The environments of conversations that a recipe names by one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.config.named_modules import entry_points_of

BUILT_IN_ENVIRONMENTS: dict[str, str] = {  # name in a recipe -> module:class
    "calculator": "covey.llm.conversation.environments.calculator:Calculator",
    "python": "covey.llm.conversation.environments.python:Python",
    "search": "covey.llm.conversation.environments.search:Search",
    "guess_number": "covey.llm.conversation.environments.guess_number:GuessNumber",
    "maze": "covey.llm.conversation.environments.maze:Maze",
}
# Those of covey-environments: name in a recipe -> the module that it imports; an extra of the same name has both.
ADAPTERS: dict[str, str] = {"gymnasium": "gymnasium", "openenv": "websockets", "verifiers": "verifiers"}


def installed_environments() -> Mapping[str, str]:
    """Name in a recipe -> module:Class, of the environments that other packages have."""
    return entry_points_of("covey.environments")


def class_of(environment: str) -> str:
    """An environment as module:Class or file.py:Class; an unknown name as it is."""
    if ":" in environment or environment in BUILT_IN_ENVIRONMENTS:
        return BUILT_IN_ENVIRONMENTS.get(environment, environment)
    return installed_environments().get(environment, environment)


def imported_module(environment: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """The module that a built-in environment imports by its option `id`, and the library that it is for; "": none."""
    name = str(options.get("id", ""))
    if environment == "verifiers":
        return name.replace("-", "_").rpartition("/")[2], environment
    return name.rpartition(":")[0] if environment == "gymnasium" else "", environment
