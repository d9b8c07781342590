"""Environments: objects of a user's class that answer the model, in one of two styles, and adapters.

step     step(message: str) -> (reply, reward, done): called with the text of every turn
tools    public methods with type hints and a docstring are tools, which the model calls (TRL's environments)
respond  adapters of other libraries, which get every turn with its calls (`adapter.py`)

Both styles may have `reset(**columns)`, called once with the columns of the data. It returns the first observation,
which follows the prompt, or None. The `reward` attribute of an environment with tools is its reward at the end.
`close()` is called after a conversation that did not fail.

The functions below `begin` run in the process of environments (`covey.runtime.worker`). The file of the environment is
imported once, or a class of a Python program read, and an adapter is prepared, before the process forks for every
conversation, so that no conversation sees what another one changed. Global random generators are seeded before each
conversation, so that an environment that uses them is repeatable.
"""

import base64
import importlib
import inspect
import json
import math
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from covey.llm.conversation.adapter import Adapter, WrongEnvironment
from covey.runtime.worker.child import Answer, InvalidResult, load_function, one_line, shown

LONGEST_ATTRIBUTE = 1 << 16  # characters of an attribute in JSON that rewards can read
MOST_ATTRIBUTES = 100
_NOT_CALLED = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NO_TOOLS = frozenset({"reset", "step", "close"})  # public methods that the run calls, and the model does not


def begin(setup: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], Answer]]:
    """The service of a worker: the style of the environment, and what makes one from a seed."""
    kind: Any
    tools = None
    if setup["copied"]:
        kind, tools = pickle.loads(base64.b64decode(setup["copied"]))  # of the run itself
    else:
        kind = load_function(setup["load"])
    options = setup["options"]
    try:
        check_options(kind, options)
        style = style_of(kind) if isinstance(kind, type) else ""
        if style == "respond":
            kind.prepare(**options)  # an adapter has it
    except WrongEnvironment as error:
        raise InvalidResult(str(error)) from None

    def make(seed: int) -> Answer:
        _seed(seed)
        return HostedEnvironment(partial(kind, **options), setup["reply_characters"], tools).answer

    return {"style": style}, make


def _seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, if they are loaded."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if torch is not None:
        torch.manual_seed(seed % 2**63)


def style_of(kind: Any) -> str:
    """ "step", "tools" or "respond".

    Raises:
        WrongEnvironment: if the class has none.
    """
    if isinstance(kind, Adapter) or (isinstance(kind, type) and issubclass(kind, Adapter)):
        return "respond"
    if callable(getattr(kind, "step", None)):
        return "step"
    own = [name for name in dir(kind) if not name.startswith("_") and name not in NO_TOOLS]
    if any(callable(getattr(kind, name, None)) for name in own):
        return "tools"
    raise WrongEnvironment(
        f"{getattr(kind, '__name__', type(kind).__name__)} is not an environment: it needs a method step(message) that "
        "returns a reply, a reward and whether the conversation is over, or public methods that are tools"
    )


def check_options(kind: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that a class does not take, and missing ones.

    Raises:
        WrongEnvironment: naming the argument.
    """
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # a class in C
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        names = [parameter.name for parameter in signature.parameters.values() if parameter.kind not in _ANY]
        raise WrongEnvironment(
            f"conversation.options: {error}; its options are {', '.join(names) or 'none'}: give each a default value, "
            'set options = ["NAME = VALUE"], or in Python use functools.partial'
        ) from None


def check_methods(environment: Any) -> None:
    """Refuse methods that the run cannot call.

    Raises:
        WrongEnvironment: naming the method.
    """
    owner = type(environment).__name__
    for name in ("reset", "step", "close"):
        method = getattr(environment, name, None)
        if any(uncalled(method) for uncalled in _NOT_CALLED):
            raise WrongEnvironment(f"{owner}.{name} is an async function or a generator: make it an ordinary method")
    if style_of(environment) != "step":
        return
    try:
        inspect.signature(environment.step).bind("")
    except TypeError:
        raise WrongEnvironment(
            f"{owner}.step does not take one argument, the text of a turn: write def step(self, message)"
        ) from None
    except ValueError:  # a method in C
        return


class HostedEnvironment:
    """An environment of one conversation, served by requests: dicts of JSON's types.

    >>> hosted.answer({"do": "reset", "columns": {"secret": 7}})
    {'text': 'Guess a number from 1 to 10.'}
    >>> hosted.answer({"do": "step", "message": "5"})
    {'text': 'higher', 'reward': 0.0, 'done': False}
    >>> hosted.answer({"do": "end"})
    {'attributes': {'secret': 7, 'guesses': 1}, 'reward': None}
    """

    def __init__(self, kind: Callable[[], Any], reply_characters: int, tools: list[Any] | None = None) -> None:
        """
        Args:
            kind: the class, or a function that makes an environment.
            reply_characters: the longest reply, of which the rest is left out.
            tools: those of `covey.llm.conversation.tools.describe_tools`, if they are known.
        """
        self._kind, self._limit, self._tools = kind, reply_characters, tools
        self._environment: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request. If the environment raises, it is {"failed": one line}."""
        try:
            reply = self._answer(request)
            json.dumps(reply)
        except WrongEnvironment as error:
            return {"failed": str(error)}
        except BaseException as error:
            known = type(error).__name__ == "ConfigError"  # of a tool that cannot be described
            return {"failed": str(error) if known else one_line(error)}
        return reply

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._environment is None:
            made = self._kind()
            check_methods(made)
            self._environment = made
        environment = self._environment
        match request["do"]:
            case "describe":
                return self._describe()
            case "reset":
                return {"text": self._reset(request["columns"])}
            case "step":
                return self._step(request["message"])
            case "call":
                return {"texts": [self._call(call) for call in request["calls"]]}
            case "respond":
                return self._respond(request)
            case "rows":
                return {"rows": environment.rows() if isinstance(environment, Adapter) else None}
        return self._end()

    def _describe(self) -> dict[str, Any]:
        style = style_of(self._environment)
        if style == "respond":
            return {"style": style, "tools": self._environment.tool_schemas()}
        if style == "step":
            return {"style": style, "tools": []}
        if self._tools is None:
            tools = importlib.import_module("covey.llm.conversation.tools")
            self._tools = tools.describe_tools(self._environment)
        return {"style": style, "tools": [tool.schema for tool in self._tools]}

    def _reset(self, columns: Mapping[str, Any]) -> str | None:
        reset = getattr(self._environment, "reset", None)
        if reset is None:
            return None
        first = reset(**_accepted(reset, columns))
        return None if first is None else self._text(first, "reset")

    def _step(self, message: str) -> dict[str, Any]:
        found = self._environment.step(message)
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise WrongEnvironment(f"step returned {shown(found)} instead of a reply, a reward and whether it is over")
        reply, reward, done = found
        number = _reward(reward, "step")
        if not isinstance(done, int) and type(done).__name__ not in ("bool", "bool_"):
            raise WrongEnvironment(f"step returned {shown(done)} as the third value: True or False is needed")
        text = "" if reply is None and done else self._text(reply, "step")
        return {"text": text, "reward": number, "done": bool(done)}

    def _respond(self, request: Mapping[str, Any]) -> dict[str, Any]:
        response = self._environment.respond(request["message"], request["calls"])
        return {
            "texts": [self._text(result, "respond") for result in response.results],
            "text": None if response.text is None else self._text(response.text, "respond"),
            "reward": _reward(response.reward, "respond"),
            "done": bool(response.done),
        }

    def _end(self) -> dict[str, Any]:
        environment = self._environment
        adapter = isinstance(environment, Adapter)
        reward = environment.score() if adapter else getattr(environment, "reward", None)
        if not adapter:
            paid = None if callable(reward) else _number(reward)
        else:
            paid = None if reward is None else _reward(reward, "score")
        end = {"attributes": _attributes(environment), "reward": paid}
        close = getattr(environment, "close", None)
        if callable(close):
            close()
        return end

    def _call(self, call: Mapping[str, Any]) -> str:
        tools = importlib.import_module("covey.llm.conversation.tools")
        calls = importlib.import_module("covey.llm.conversation.tool_calls")
        checked = calls.ToolCall(call["name"], call["arguments"])  # the run has checked it
        return self._text(tools.run_tool(self._environment, checked, self._tools), call["name"])

    def _text(self, value: Any, method: str) -> str:
        """A reply without lone surrogates, cut at the limit."""
        if not isinstance(value, str):
            raise WrongEnvironment(f"{method} returned {shown(value)} instead of a text")
        left_out = len(value) - self._limit
        text = value[: self._limit].encode("utf-8", "replace").decode()
        return f"{text} ... ({left_out:,} more characters)" if left_out > 0 else text


def _accepted(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a method takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise WrongEnvironment(f"reset takes {name!r} by position, but gets columns by name: take out the /")
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if required and name not in columns:
            there = ", ".join(columns) or "no columns"
            raise WrongEnvironment(f"reset asks for {name!r}, but the data has only {there}")
    return {name: value for name, value in columns.items() if name in parameters}


def _attributes(environment: Any) -> dict[str, Any]:
    """Public attributes of JSON's types, for rewards over the conversation."""
    found: dict[str, Any] = {}
    for name, value in list(getattr(environment, "__dict__", {}).items()):
        if name.startswith("_") or len(found) == MOST_ATTRIBUTES:
            continue
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        if len(text) <= LONGEST_ATTRIBUTE:
            found[name] = json.loads(text)
    return found


def _reward(value: Any, method: str) -> float:
    """The reward that a method returned; 0 for None."""
    number = _number(value)
    if number is None and value is not None:
        raise WrongEnvironment(f"{method} returned the reward {shown(value)}: a finite number is needed")
    return number or 0.0


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if value is None or isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
