"""Environments of conversations in processes, each under a deadline.

A Python program may give an environment as a class, a factory or functions, which are copied with cloudpickle: a class
that a module has by the module's name, one of a script or a notebook with the names that it uses. So its death ends its
conversation alone, as for an environment in a file. Objects of the program that it uses are copies. The bytes go from
this process to its own child.
"""

import base64
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import cloudpickle

from covey.config import ConfigError
from covey.config.named_modules import search_path
from covey.llm.conversation import environment as service
from covey.llm.conversation.environment import WrongEnvironment, style_of
from covey.llm.conversation.tools import describe_tools
from covey.runtime.worker.child import one_line
from covey.runtime.worker.process import CallError
from covey.runtime.worker.sessions import Session, Sessions

LOAD_LEAST_SECONDS = 60.0  # to import a file of environments, or to prepare an adapter
Reply = dict[str, Any]


class EnvironmentProcesses:
    """Environments of one class, each in a process."""

    def __init__(
        self,
        name: str,
        timeout_seconds: float,
        reply_characters: int,
        options: Mapping[str, Any] | None = None,
        copied: bytes | None = None,
        path: Sequence[str] = (),
    ) -> None:
        """
        Args:
            name: of the class, file.py:Class or module:Class.
            timeout_seconds: deadline of a call.
            reply_characters: longest reply.
            options: keyword arguments of the class.
            copied: the class of a Python program, from `copied_environment`; then `name` is only for messages.
            path: `sys.path` of the process; empty: that of `search_path`.
        """
        self.name, self.timeout_seconds = name, timeout_seconds
        setup = {
            "load": name,
            "reply_characters": reply_characters,
            "options": dict(options or {}),
            "copied": base64.b64encode(copied or b"").decode(),
        }
        self._sessions = Sessions(
            service, lambda: setup | {"path": [*path] or search_path(name)}, timeout_seconds,
            max(timeout_seconds, LOAD_LEAST_SECONDS), field="conversation.timeout_seconds",
        )  # fmt: skip

    def start(self) -> None:
        """Start the worker, which imports the class.

        Raises:
            ConfigError: if it cannot be imported or is not an environment.
        """
        with self._loading():
            self._sessions.start()

    def open(self, seed: int) -> Session:
        """The environment of one conversation; global random generators of its process are seeded."""
        with self._loading():
            return self._sessions.open(seed)

    def close(self) -> None:
        """End all environments."""
        self._sessions.close()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        try:
            yield
        except CallError as error:
            name = self.name.removeprefix("covey.llm.conversation.environments.")
            raise ConfigError(f"environment {name} {error}") from None


def copied_environment(environment: Any, name: str) -> bytes:
    """An environment for `EnvironmentProcesses`: what makes one, and its tools if they are known.

    Tools of a class are described here, because type hints in quotes may use names that are not copied.

    Args:
        environment: a class, a function that makes an environment, or a list of functions
            that are tools.
        name: of the environment in messages.

    Raises:
        ConfigError: if it is none of these, has a tool that cannot be described, or cannot be copied.
    """
    make, kind = _maker(environment, name)
    tools = None
    if kind is not None:
        try:
            style = style_of(kind)
        except WrongEnvironment as error:
            raise ConfigError(f"the environment: {error}") from None
        if style != "respond":  # an adapter is asked in its process
            tools = [] if style == "step" else describe_tools(kind)
    try:
        with _by_value(_modules_out_of_reach(environment)):
            copied: bytes = cloudpickle.dumps((make, tools))
            return copied
    except Exception as error:
        reason = one_line(error.with_traceback(None))
        raise ConfigError(
            f"the environment {name} cannot be copied into its process ({reason}): make what cannot be copied in its "
            "__init__ or reset, or name the class as file.py:Class"
        ) from None


def _maker(environment: Any, name: str) -> tuple[Callable[..., Any], type | None]:
    """What makes an environment, and its class if it is known."""
    if isinstance(environment, (list, tuple)):
        kind = _tools_of(environment)
        return kind, kind
    made = environment.func if isinstance(environment, partial) else environment
    if not callable(made):
        raise ConfigError(
            f"the environment of a conversation is an object of the class {name}: give the class, of which each "
            "conversation makes its own object, or a function that makes one"
        )
    return environment, made if isinstance(made, type) else None


def _tools_of(functions: Sequence[Any]) -> type:
    """An environment whose tools are these functions."""
    for function in functions:
        if not hasattr(function, "__name__") or not callable(function) or isinstance(function, type):
            raise ConfigError(f"the tools of a conversation are functions, and one is {function!r:.60}: give functions")
        if function.__name__.startswith("_") or not function.__name__.isidentifier():
            raise ConfigError(
                f"a tool of a conversation has the name {function.__name__!r}: name it without underscore"
            )
    names = [function.__name__ for function in functions]
    if not names:
        raise ConfigError("the conversation has an empty list of tools: give at least one function")
    if len(set(names)) < len(names):
        raise ConfigError(f"two tools of a conversation have the same name: {', '.join(names)}")
    return type("Tools", (), {function.__name__: staticmethod(function) for function in functions})


def _modules_out_of_reach(environment: Any) -> Iterator[ModuleType]:
    """Modules of a class and its bases, or of functions, that another process cannot import: a test runner's, say."""
    given = environment if isinstance(environment, (list, tuple)) else [getattr(environment, "func", environment)]
    for part in (base for one in given for base in getattr(one, "__mro__", (one,))):
        name = getattr(part, "__module__", None) or "__main__"
        known = name == "__main__" or name.partition(".")[0] in sys.builtin_module_names
        if not known and name in sys.modules and PathFinder.find_spec(name.partition(".")[0]) is None:
            yield sys.modules[name]


@contextmanager
def _by_value(modules: Iterator[ModuleType]) -> Iterator[None]:
    """Context manager in which cloudpickle copies the content of these modules instead of naming it."""
    already = cloudpickle.list_registry_pickle_by_value()
    copied = [module for module in dict.fromkeys(modules) if module.__name__ not in already]
    for module in copied:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in copied:
            cloudpickle.unregister_pickle_by_value(module)
