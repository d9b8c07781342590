"""The table of built-in environments of conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUILT_IN_ENVIRONMENTS: dict[str, str] = {  # name in a recipe -> module:class
    "calculator": "covey.llm.conversation.environments.calculator:Calculator",
    "python": "covey.llm.conversation.environments.python:Python",
    "search": "covey.llm.conversation.environments.search:Search",
    "guess_number": "covey.llm.conversation.environments.guess_number:GuessNumber",
    "maze": "covey.llm.conversation.environments.maze:Maze",
    "gymnasium": "covey.llm.conversation.environments.gymnasium:Gymnasium",
    "openenv": "covey.llm.conversation.environments.openenv:OpenEnv",
    "verifiers": "covey.llm.conversation.environments.verifiers:Verifiers",
}
# Name in a recipe -> the module that it needs, which an extra of the same name as the environment has.
ENVIRONMENT_PACKAGES: dict[str, str] = {"openenv": "websockets", "verifiers": "verifiers"}


def imported_module(environment: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """The module that a built-in environment imports by its option `id`, and the library that it is for; "": none."""
    name = str(options.get("id", ""))
    if environment == "verifiers":
        return name.replace("-", "_").rpartition("/")[2], environment
    return name.rpartition(":")[0] if environment == "gymnasium" else "", environment
