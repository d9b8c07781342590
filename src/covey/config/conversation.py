"""The [conversation] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

from covey.config.builtin_environments import class_of
from covey.config.common import ConfigError, Table, config_field

GIVEN_IN_PYTHON = " (given in Python)"  # after the name of an environment that only a Python program has


@dataclass(frozen=True)
class ConversationConfig(Table):
    environment: str = config_field(
        "",
        "environment that answers the model, so that a rollout has several turns: a built-in one, or your own "
        "file.py:Class or module:Class; empty: rollouts are single completions",
    )
    options: tuple[str, ...] = config_field(
        (),
        'keyword arguments of the environment\'s class, each as in a TOML file: [\'folder = "texts"\', "results = 2"]',
        advanced=True,
    )
    turns: int = config_field(8, "most turns of the model in a conversation", min=1, max=10_000)
    total_tokens: int = config_field(
        512,
        "most tokens of a conversation after its prompt, replies included; sampling.max_new_tokens is the limit of one "
        "turn",
        min=1,
        max=1_000_000,
    )
    reply_characters: int = config_field(
        4000,
        "longest reply of the environment that the model reads, in characters; the rest is left out",
        min=1,
        max=10_000_000,
        advanced=True,
    )
    timeout_seconds: float = config_field(
        10.0,
        "deadline of a call of the environment; importing its file has the same, at least 60 s",
        above=0,
        max=86_400,
        advanced=True,
    )

    @property
    def source(self) -> str:
        """The class of the environment as file.py:Class or module:Class."""
        return class_of(self.environment)

    @property
    def given_in_python(self) -> str:
        """The name of an environment that a Python program gave; "" for one that a recipe can name."""
        name = self.environment
        return name.removesuffix(GIVEN_IN_PYTHON) if name.endswith(GIVEN_IN_PYTHON) else ""


@dataclass(frozen=True)
class Conversation(ConversationConfig):
    """The conversations of `covey.run(config, conversation=...)`: [conversation] with an environment in Python.

    >>> covey.Conversation(MyEnvironment, turns=4, total_tokens=256)
    >>> covey.Conversation([add, multiply])

    `environment` is a class, a function without arguments that makes an environment, a list of functions that are
    tools, or a name as in a recipe. Docs: docs/conversations.md.
    """

    environment: Any = config_field(  # noqa: RUF009 -- a dataclasses.field, made once on purpose
        "", "class of the environment, function that makes one, functions that are tools, or a name as in a recipe"
    )


def with_conversation(config: Any, conversation: ConversationConfig | None) -> tuple[Any, Any]:
    """The config of a run with the conversations that a Python program gave, and their environment.

    The config then has the environment's name. The environment is None if the config names it: it is a built-in one, or
    in a file or module.

    Raises:
        ConfigError: if `conversation` is no `Conversation`.
    """
    if conversation is None or not is_dataclass(config) or isinstance(config, type):
        return config, None  # `validate` refuses what is no config
    if not isinstance(conversation, ConversationConfig):
        name = _name_of(conversation)
        raise ConfigError(f"conversation is {name}: give covey.Conversation({name}), with its limits if you like")
    if not hasattr(config, "conversation"):
        raise ConfigError("a run on a Gymnasium environment has no conversations: leave conversation out")
    environment = conversation.environment
    if environment in ("", None):
        raise ConfigError("the conversation has no environment: give covey.Conversation a class")
    values: dict[str, Any] = {item.name: getattr(conversation, item.name) for item in fields(conversation)}
    if isinstance(environment, str):
        return replace(config, conversation=ConversationConfig(**values)), None
    values["environment"] = f"{_name_of(environment)}{GIVEN_IN_PYTHON}"
    return replace(config, conversation=ConversationConfig(**values)), environment


def _name_of(environment: Any) -> str:
    """The name of a class, a function or functions, as a Python program would write it."""
    if isinstance(environment, (list, tuple)):
        return f"[{', '.join(map(_name_of, environment))}]"
    if isinstance(environment, partial):
        return _name_of(environment.func)
    return str(getattr(environment, "__name__", type(environment).__name__))
