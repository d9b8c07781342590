"""Calls a reward function and checks its results, in the run's process or in that of `worker.py`.

This file imports the standard library only, so that the worker starts in milliseconds.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENVIRONMENTS = "environments"  # argument with the attributes of the conversations' environments, as objects
FAILURES_ALLOWED = 0.2  # fraction of a step's rollouts that may have no reward
LONGEST_MESSAGE = 300  # characters of an exception in a message
LARGEST_METRIC = 1e300  # so that the sum over a step is finite
LONGEST_NAME = 100  # characters in the name of a logged metric or column
_OWN_NAMES = ("reward_call.py", "worker.py", "runner.py", "reward_process.py", "adapters.py")
_OWN_FILES = {str(Path(__file__).with_name(name)) for name in _OWN_NAMES}
_OWN_FILES |= {
    str(Path(__file__).parents[1] / "conversation" / name)
    for name in ("environment.py", "environment_worker.py", "tools.py")
}
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class RewardCallError(Exception):
    """The call gave no rewards: the function raised, or its process ended."""


class RewardTimeout(RewardCallError):
    """The call was still running at its deadline."""


class InvalidRewardOutput(Exception):
    """The call returned something other than one number or None per completion, or logged something unusable."""


@dataclass(frozen=True)
class Results:
    """Values that one call of a reward function returned and logged."""

    values: list[Any]  # one float or None per completion; for a step reward one list of floats or None
    metrics: Mapping[str, list[float]]  # `log_metric`: all values of each name
    extras: Mapping[str, list[Any]]  # `log_extra`: one value per completion for each column
    errors: Mapping[int, str] = field(default_factory=dict)  # completion -> why its grading failed; its value is None


class Log:
    """TRL's `log_metric` and `log_extra` during one call. The first mistake is raised there and kept in `error`."""

    def __init__(self, count: int) -> None:
        """`count` is the number of completions, the length of every column."""
        self.count = count
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}
        self.error: InvalidRewardOutput | None = None

    def log_metric(self, name: str, value: Any) -> None:
        """Record a number; a run reports the mean of the finite numbers over the calls of a step."""
        where = self._checked_name("log_metric", name)
        number = None if isinstance(value, str) else _float_of(value)
        if number is None:
            raise self._wrong(f"called {where} with {shown(value)}: a number is needed")
        if abs(number) <= LARGEST_METRIC:  # False for NaN
            self.metrics.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Any) -> None:
        """Record one value for every completion, which is written with it to the run's files."""
        where = self._checked_name("log_extra", column)
        items = list_of(values, self.count)
        if items is None:
            raise self._wrong(f"called {where} with {shown(values)}: a list of {self.count} values is needed")
        if len(items) != self.count:
            raise self._wrong(
                f"called {where} with {_length_of(values, items, self.count)} values for {self.count} completions"
            )
        self.extras[column] = [self._plain(where, item) for item in items]

    def _plain(self, where: str, item: Any) -> Any:
        """A value in JSON's types; a scalar of NumPy or torch becomes a number."""
        if item is not None and not isinstance(item, (bool, int, float, str, list, tuple, dict)):
            item = item.item() if hasattr(item, "item") and not getattr(item, "shape", ()) else item
        try:
            return json.loads(json.dumps(item))
        except (TypeError, ValueError, RecursionError):
            raise self._wrong(f"called {where} with {shown(item)}, which cannot be written as JSON") from None

    def _checked_name(self, function: str, name: Any) -> str:
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise self._wrong(f"called {function} with the name {shown(name)}: a short text is needed")
        return f"{function}({name!r}, ...)"

    def _wrong(self, message: str) -> InvalidRewardOutput:
        self.error = self.error or InvalidRewardOutput(message)
        return self.error


def call_function(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    global_step: int,
    step_counts: Sequence[int] | None = None,
) -> Results:
    """Call with TRL's signature; a coroutine is awaited. Returns one float or None per completion.

    With `step_counts`, the number of reasoning steps of every completion, it returns one list or None per completion,
    with one float for each step.

    A function without `**kwargs` gets only the arguments that it names. In addition to the columns these are
    `trainer_state` (its `global_step` is the number of updates of the weights that sampled the completions),
    `log_metric(name, value)` and `log_extra(column, values)`.

    Raises:
        InvalidRewardOutput: for a wrong count, or a value that is not a number.
        TypeError: if the function needs an argument that is no column of the data.
        Exception: any that the function raises.
    """
    count = len(arguments["completions"])  # the function may change its arguments
    log = Log(count)
    results = function(**_accepted(function, arguments, global_step, log))
    if inspect.isawaitable(results):
        import asyncio  # slow to import, and rarely needed

        async def wait() -> Any:
            return await results

        results = asyncio.run(wait())
    values = checked_values(results, count, step_counts)
    if log.error is not None:
        raise log.error
    return Results(values, log.metrics, log.extras)


def call_on_text(function: Callable[..., Any], text: str) -> list[int]:
    """Call a boundary function on one text; returns its positions.

    Raises:
        InvalidRewardOutput: if they are not a list of whole numbers.
        Exception: any that the boundary function raises.
    """
    return checked_positions(function(text), len(text))


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any], global_step: int, log: Log) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    given = {
        **arguments,
        **{name: [SimpleNamespace(**item) for item in arguments[name]] for name in arguments if name == ENVIRONMENTS},
        "trainer_state": SimpleNamespace(global_step=global_step),
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
    }
    named = {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if required and parameter.name not in given:
            raise TypeError(f"it asks for {parameter.name!r}, but the data has only {', '.join(arguments)}")
    return {name: value for name, value in given.items() if takes_all or name in named}


# ---- checks of the results ----


def checked_values(results: Any, count: int, step_counts: Sequence[int] | None = None) -> list[Any]:
    """Results of a reward function as plain floats and None; arguments and errors as in `call_function`."""
    values = list_of(results, count)
    if values is None:
        what = "numbers" if step_counts is None else "lists"
        raise InvalidRewardOutput(f"returned {shown(results)} instead of a list of {count} {what}")
    if len(values) != count:
        raise InvalidRewardOutput(f"returned {_length_of(results, values, count)} results for {count} completions")
    if step_counts is None:
        return [_number(value) for value in values]
    return [_step_numbers(value, steps) for value, steps in zip(values, step_counts, strict=True)]


def checked_positions(results: Any, length: int) -> list[int]:
    """Results of a boundary function as plain integers. Raises InvalidRewardOutput for anything else."""
    positions = list_of(results, length + 1)
    if positions is None or len(positions) > length + 1:
        raise InvalidRewardOutput(f"returned {shown(results)} instead of a list of positions in the text")
    for position in positions:
        if not hasattr(position, "__index__"):  # NumPy's whole numbers have it too
            raise InvalidRewardOutput(
                f"returned {shown(position)} where a position in the text, a whole number, is needed"
            )
    return [int(position) for position in positions]


def list_of(results: Any, count: int) -> list[Any] | None:
    """The first `count` + 1 items of an ordered iterable, also of a generator; None for any other value."""
    if isinstance(results, (str, bytes, bytearray, Mapping, set, frozenset)):
        return None
    try:
        items = iter(results)
    except TypeError:
        return None
    return list(islice(items, count + 1))  # a generator may have no end


def _length_of(results: Any, items: list[Any], count: int) -> str:
    """The length as far as it is known; `items` is the result of `list_of`."""
    if len(items) <= count:
        return str(len(items))
    return str(len(results)) if type(results) in (list, tuple) else f"{len(items)} or more"


def _step_numbers(value: Any, count: int) -> list[float] | None:
    """The checked result of a step reward for one completion of `count` steps."""
    if value is None:
        return None
    items = list_of(value, count)
    if items is None:
        raise InvalidRewardOutput(
            f"returned {shown(value)} for a completion of {count} steps: with per_step = true a list is needed, one "
            "number for each of its `steps`"
        )
    numbers = [_number(item) for item in items]
    if len(numbers) != count:
        raise InvalidRewardOutput(
            f"returned {_length_of(value, items, count)} numbers for a completion of {count} steps: give one for each "
            "item of `steps`"
        )
    if None in numbers:
        raise InvalidRewardOutput(
            "returned None for a step: give every step a number, or None in place of the whole list"
        )
    return numbers  # type: ignore[return-value]


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = None if isinstance(value, (str, bytes, bytearray)) else _float_of(value)
    if number is None:
        steps = isinstance(value, (list, tuple))
        fix = "; for one number for each reasoning step set per_step = true" if steps else ""
        raise InvalidRewardOutput(f"returned {shown(value)} where a number or None is needed{fix}")
    return number


def _float_of(value: Any) -> float | None:
    """A plain float; None if the value is no number. RuntimeError is torch's for a tensor of several numbers."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


# ---- one line for the user ----


def shown(value: Any) -> str:
    """The type of a value and the beginning of its repr, in one printable line, even if its methods raise."""
    if value is None:
        return "None"
    try:
        text = reprlib.repr(value)
    except BaseException:
        text = "(its repr raises)"
    return one_printable_line(f"{type(value).__name__} {text:.60}")


def one_line(error: BaseException) -> str:
    """An exception in one printable line, with the line of the user's function that it passed through."""
    try:
        text = str.__getitem__(str(error), slice(4 * LONGEST_MESSAGE))  # a message may have gigabytes
    except BaseException as another:
        text = f"(its text cannot be shown: str() raised {type(another).__name__})"
    text = one_printable_line(f"{type(error).__name__}: {text}")
    return (text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "...") + _where(error)


def printable(text: str) -> str:
    """The text without control characters except line ends and tabs."""
    return _CONTROL_CHARACTER.sub(lambda match: ascii(match[0])[1:-1], text)


def one_printable_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _where(error: BaseException) -> str:
    """The first line of the traceback that is neither in covey nor in the import system or asyncio."""
    step = error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if name not in _OWN_FILES and not name.startswith("<frozen") and f"{os.sep}asyncio{os.sep}" not in name:
            return f" ({one_printable_line(Path(name).name)} line {step.tb_lineno})"
        step = step.tb_next
    return ""
