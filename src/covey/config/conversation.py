"""The [conversation] table of a recipe."""

from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from covey.config.common import ConfigError, Table, config_field, table
from covey.config.fields import did_you_mean
from covey.config.files import read_assignments
from covey.config.named_modules import check_function_name, entry_points_of, find_module

BUILT_IN_ENVIRONMENTS: dict[str, str] = {  # name in a recipe -> module:class
    "calculator": "covey.llm.conversation.environments.calculator:Calculator",
    "python": "covey.llm.conversation.environments.python:Python",
    "search": "covey.llm.conversation.environments.search:Search",
    "guess_number": "covey.llm.conversation.environments.guess_number:GuessNumber",
    "maze": "covey.llm.conversation.environments.maze:Maze",
}
# Those of covey-environments: name in a recipe -> the module that it imports; an extra of the same name has both.
ADAPTERS: dict[str, str] = {"gymnasium": "gymnasium", "openenv": "websockets", "verifiers": "verifiers"}
GIVEN_IN_PYTHON = " (given in Python)"  # after the name of an environment that only a Python program has


def installed_environments() -> dict[str, str]:
    """Name in a recipe -> module:Class, of the environments that other packages have."""
    return entry_points_of("covey.environments")


@table(frozen=True)
class ConversationConfig(Table):
    SWITCH = ("environment",)

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
        """The class of the environment as file.py:Class or module:Class; an unknown name as it is."""
        name = self.environment
        if ":" in name or name in BUILT_IN_ENVIRONMENTS:
            return BUILT_IN_ENVIRONMENTS.get(name, name)
        return installed_environments().get(name, name)

    @property
    def given_in_python(self) -> str:
        """The name of an environment that a Python program gave; "" for one that a recipe can name."""
        name = self.environment
        return name.removesuffix(GIVEN_IN_PYTHON) if name.endswith(GIVEN_IN_PYTHON) else ""

    @property
    def assigned_options(self) -> dict[str, Any]:
        """Name -> value of `options`. Raises ConfigError for an entry that is not a TOML assignment."""
        example = '"results = 2" or \'folder = "texts"\''
        return read_assignments(self.options, "conversation.options", example=example, taken=())

    @property
    def imported_module(self) -> tuple[str, str]:
        """The module that a built-in environment imports by its option `id`, and the library that it is for."""
        name = str(self.assigned_options.get("id", ""))
        if self.environment == "verifiers":
            return name.replace("-", "_").rpartition("/")[2], self.environment
        return name.rpartition(":")[0] if self.environment == "gymnasium" else "", self.environment

    def check(self) -> None:
        if self.environment:
            module, library = self.imported_module
            find_module(module, "conversation.options: id", library)

    def check_name(self) -> None:
        """Refuse an environment that a recipe cannot name, or that does not exist.

        Raises:
            ConfigError: one line that names the remedy.
        """
        if given := self.given_in_python:
            raise ConfigError(
                f"the environment {given} of this run was given in Python: call covey.run or covey.resume with "
                f"conversation=covey.Conversation({given}, ...), or set conversation.environment to file.py:Class"
            )
        name = self.environment
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


@table(frozen=True)
class Conversation(ConversationConfig):
    """The conversations of `covey.run(config, conversation=...)`: [conversation] with an environment in Python.

    >>> covey.Conversation(MyEnvironment, turns=4, total_tokens=256)
    >>> covey.Conversation([add, multiply])

    `environment` is a class, a function without arguments that makes an environment, a list of functions that are
    tools, or a name as in a recipe. Docs: docs/conversations.md.
    """

    environment: Any = config_field(
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
        return config, None  # `validate` refuses what is not a config
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
