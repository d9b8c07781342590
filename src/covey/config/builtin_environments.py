"""The environments of conversations that a recipe names by one word."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from covey.config.named_modules import is_installed

ENTRY_POINTS = "covey.environments"  # group of the environments of other packages: name in a recipe = module:Class

BUILT_IN_ENVIRONMENTS: dict[str, str] = {  # name in a recipe -> module:class
    "calculator": "covey.llm.conversation.environments.calculator:Calculator",
    "python": "covey.llm.conversation.environments.python:Python",
    "search": "covey.llm.conversation.environments.search:Search",
    "guess_number": "covey.llm.conversation.environments.guess_number:GuessNumber",
    "maze": "covey.llm.conversation.environments.maze:Maze",
}
# Those of covey-environments: name in a recipe -> the module that it imports; an extra of the same name has both.
ADAPTERS: dict[str, str] = {"gymnasium": "gymnasium", "openenv": "websockets", "verifiers": "verifiers"}


@cache  # the lists of all packages are read
def installed_environments() -> dict[str, str]:
    """Name in a recipe -> module:Class, of installed packages; what the working folder claims to be one does not
    count."""
    return {
        point.name: point.value
        for point in entry_points(group=ENTRY_POINTS)
        if point.dist is not None and is_installed(Path(str(point.dist.locate_file(""))))
    }


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
