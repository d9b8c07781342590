"""The table of built-in environments of conversations."""

from __future__ import annotations

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
