"""Rules of the [conversation] table."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from covey.config.assignments import read_assignments
from covey.config.builtin_environments import ADAPTERS, BUILT_IN_ENVIRONMENTS, imported_module, installed_environments
from covey.config.common import ConfigError
from covey.config.conversation import ConversationConfig
from covey.config.fields import did_you_mean
from covey.config.function_source import check_function_name
from covey.config.llm import RunConfig
from covey.config.named_modules import find_module
from covey.config.tasks import EnvironmentTaskConfig


def check_conversation(config: RunConfig, *, own_environment: bool) -> None:
    """Refuse conversations that cannot work, and fields of [conversation] in any other run.

    Args:
        own_environment: a script gives the environment, of which the config has the name.

    Raises:
        ConfigError: one line that names the field and the fix.
    """
    conversation = config.conversation
    uses = [reward for reward in config.rewards if reward.name == "environment"]
    if not conversation.environment:
        if conversation != ConversationConfig():
            item = next(item for item in fields(conversation) if getattr(conversation, item.name) != item.default)
            raise ConfigError(
                f"conversation.{item.name} is set, but conversation.environment is not, so rollouts are single "
                "completions: name an environment, or take the table out"
            )
        if uses:
            raise ConfigError(
                "the reward environment is that of a conversation's environment: set conversation.environment"
            )
        if isinstance(config.task, EnvironmentTaskConfig):
            raise ConfigError(
                "the task environment has the prompts of a conversation's environment: set conversation.environment"
            )
        return
    if not own_environment:
        _check_name(conversation)
    module, library = imported_module(conversation.environment, environment_options(conversation))
    find_module(module, "conversation.options: id", library)
    if config.sampling.max_new_tokens > conversation.total_tokens:
        raise ConfigError(
            f"sampling.max_new_tokens ({config.sampling.max_new_tokens}), the limit of one turn, is above "
            f"conversation.total_tokens ({conversation.total_tokens}), the limit of all: lower it, or raise "
            "total_tokens"
        )
    _refuse_parts_of_completions(config)


def _check_name(conversation: ConversationConfig) -> None:
    """Refuse an environment that a recipe cannot name, or that does not exist."""
    if given := conversation.given_in_python:
        raise ConfigError(
            f"the environment {given} of this run was given in Python: call covey.run or covey.resume with "
            f"conversation=covey.Conversation({given}, ...), or set conversation.environment to file.py:Class"
        )
    name = conversation.environment
    if ":" in name:
        check_function_name(name, "conversation.environment", "class")
    elif name in BUILT_IN_ENVIRONMENTS:
        return
    elif name in ADAPTERS:
        if name not in installed_environments() or find_spec(ADAPTERS[name]) is None:
            raise ConfigError(f'the environment {name} needs a package: pip install "covey[{name}]"')
    elif name not in installed_environments():
        names = list(dict.fromkeys([*BUILT_IN_ENVIRONMENTS, *ADAPTERS, *installed_environments()]))
        raise ConfigError(
            f"conversation.environment: there is no environment {name!r}{did_you_mean(name, names)}; there are "
            f"{', '.join(names)}, and your own as file.py:Class"
        )


def environment_options(conversation: ConversationConfig) -> dict[str, Any]:
    """Name -> value of the keyword arguments of the environment's class.

    Raises:
        ConfigError: for an entry that is no TOML assignment.
    """
    example = '"results = 2" or \'folder = "texts"\''
    return read_assignments(conversation.options, "conversation.options", example=example, taken=())


def _refuse_parts_of_completions(config: RunConfig) -> None:
    """Refuse what reads a rollout as one completion."""
    refused = {
        "evaluation.token_limits is set": bool(config.evaluation.token_limits),
        "iteration.steps is set": config.iteration.steps is not None,
        "process.boundary is set": config.process != type(config.process)(),
        "a reward is a reward model": any(reward.model for reward in config.rewards),
    }
    for fault, found in refused.items():
        if found:
            raise ConfigError(f"{fault}, which conversations do not support: take it out, or conversation.environment")
