"""Calls a reward function and checks its results, in the run's process or as the service of a worker.

A function has TRL's signature, `f(prompts, completions, **columns) -> list`, or one of these, which are recognised by
the names of their parameters:

    verl        compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": ..., ...}
    verifiers   f(prompt, completion, answer, **kwargs) -> float, and of a group: f(completions, answers) -> list

This file imports the standard library only, so that the worker starts in milliseconds.
"""

import contextlib
import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

from covey.runtime.worker.child import InvalidResult, Message, limit_resources, load_function, shown

ENVIRONMENTS = "environments"  # argument with the attributes of the conversations' environments, as objects
LARGEST_METRIC = 1e300  # so that the sum over a step is finite
LONGEST_NAME = 100  # characters in the name of a logged metric or column
VERL = {"data_source", "solution_str", "ground_truth"}
PLURALS = {"answers": "answer", "infos": "info", "tasks": "task"}  # of verifiers' group functions
VAR_KEYWORD, VAR_POSITIONAL = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
WITHOUT_ROWS = ("trainer_state", "log_metric", "log_extra")  # arguments that are not lists


def begin(setup: Message) -> tuple[Message, Callable[[Message], Message]]:
    """The service of a worker: loads the function `setup["load"]`, with a limit of `memory_mib` if it is not 0."""
    function = load_function(setup["load"])
    if setup["memory_mib"]:
        limit_resources(RLIMIT_AS=setup["memory_mib"] << 20, RLIMIT_FSIZE=0, RLIMIT_CORE=0)
    return {}, partial(_answer, function)


def _answer(function: Callable[..., Any], request: Message) -> Message:
    if "text" in request:
        return {"positions": checked_positions(function(request["text"]), len(request["text"]))}
    return vars(call_function(function, request["arguments"], request["global_step"], request["step_counts"]))


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
        self.error: InvalidResult | None = None

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

    def _wrong(self, message: str) -> InvalidResult:
        self.error = self.error or InvalidResult(message)
        return self.error


def call_function(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    global_step: int,
    step_counts: Sequence[int] | None = None,
) -> Results:
    """Call a function in any of the signatures; a coroutine is awaited. Returns one float or None per completion.

    With `step_counts`, the number of reasoning steps of every completion, it returns one list or None per completion,
    with one float for each step.

    A function without `**kwargs` gets only the arguments that it names. In addition to the columns these are
    `trainer_state` (its `global_step` is the number of updates of the weights that sampled the completions),
    `log_metric(name, value)` and `log_extra(column, values)`.

    Raises:
        InvalidResult: for a wrong count, or a value that is not a number.
        TypeError: if the function needs an argument that is not a column of the data.
        Exception: any that the function raises.
    """
    count = len(arguments["completions"])  # the function may change its arguments
    log = Log(count)
    function = adapted(function, arguments)
    given = {
        **arguments,
        **{name: [SimpleNamespace(**item) for item in arguments[name]] for name in arguments if name == ENVIRONMENTS},
        "trainer_state": SimpleNamespace(global_step=global_step),
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
    }
    results = function(**_asked_for(function, given))
    if inspect.isawaitable(results):
        import asyncio  # slow to import, and rarely needed

        async def wait() -> Any:
            return await results

        results = asyncio.run(wait())
    values = checked_values(results, count, step_counts)
    if log.error is not None:
        raise log.error
    return Results(values, log.metrics, log.extras)


# ---- checks of the results ----


def checked_values(results: Any, count: int, step_counts: Sequence[int] | None = None) -> list[Any]:
    """Results of a reward function as plain floats and None; arguments and errors as in `call_function`."""
    values = list_of(results, count)
    if values is None:
        what = "numbers" if step_counts is None else "lists"
        raise InvalidResult(f"returned {shown(results)} instead of a list of {count} {what}")
    if len(values) != count:
        raise InvalidResult(f"returned {_length_of(results, values, count)} results for {count} completions")
    if step_counts is None:
        return [_number(value) for value in values]
    return [_step_numbers(value, steps) for value, steps in zip(values, step_counts, strict=True)]


def checked_positions(results: Any, length: int) -> list[int]:
    """Results of a boundary function as plain integers. Raises InvalidResult for anything else."""
    positions = list_of(results, length + 1)
    if positions is None or len(positions) > length + 1:
        raise InvalidResult(f"returned {shown(results)} instead of a list of positions in the text")
    for position in positions:
        if not hasattr(position, "__index__"):  # NumPy's whole numbers have it too
            raise InvalidResult(f"returned {shown(position)} where a position in the text, a whole number, is needed")
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
        raise InvalidResult(
            f"returned {shown(value)} for a completion of {count} steps: with per_step = true a list is needed, one "
            "number for each of its `steps`"
        )
    numbers = [_number(item) for item in items]
    if len(numbers) != count:
        raise InvalidResult(
            f"returned {_length_of(value, items, count)} numbers for a completion of {count} steps: give one for each "
            "item of `steps`"
        )
    if None in numbers:
        raise InvalidResult("returned None for a step: give every step a number, or None in place of the whole list")
    return numbers  # type: ignore[return-value]


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = None if isinstance(value, (str, bytes, bytearray)) else _float_of(value)
    if number is None:
        steps = isinstance(value, (list, tuple))
        fix = "; for one number for each reasoning step set per_step = true" if steps else ""
        raise InvalidResult(f"returned {shown(value)} where a number or None is needed{fix}")
    return number


def _float_of(value: Any) -> float | None:
    """A plain float; None if the value is not a number. RuntimeError is torch's for a tensor of several numbers."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


# ---- signatures of other libraries ----


def adapted(function: Callable[..., Any], columns: Collection[str]) -> Callable[..., Any]:
    """The function with TRL's signature.

    A function of single completions is called once for each; coroutines are awaited together. If verl's function
    returns a dict, its "score" is the reward, and its other values are logged as columns (`log_extra`).

    Args:
        function: in any of the signatures.
        columns: names of the arguments of the call.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have none
        return function
    if parameters.keys() >= VERL:
        return _for_each(function, _verl_row)
    if "completion" in parameters and "completions" not in parameters:
        return _for_each(function, _verifiers_row)
    plurals = {
        plural: name
        for plural, name in PLURALS.items()
        if plural in parameters and plural not in columns and name in columns
    }
    if plurals:
        return _with_plurals(function, plurals)
    return function


def _with_plurals(function: Callable[..., Any], plurals: Mapping[str, str]) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        given = arguments | {plural: arguments[name] for plural, name in plurals.items()}
        return function(**_asked_for(function, given))

    return call


def _for_each(
    function: Callable[..., Any], row_of: Callable[[dict[str, Any], int], dict[str, Any]]
) -> Callable[..., Any]:
    """A function of lists that calls `function` with the arguments of each completion."""

    def call(**arguments: Any) -> Any:
        rows = [_asked_for(function, row_of(arguments, row)) for row in range(len(arguments["completions"]))]
        results = [function(**row) for row in rows]
        if any(map(inspect.isawaitable, results)):
            return _awaited(results, arguments["log_extra"])
        return _scores(results, arguments["log_extra"])

    return call


async def _awaited(results: Sequence[Awaitable[Any]], log_extra: Callable[..., None]) -> list[Any]:
    import asyncio  # slow to import, and rarely needed

    return _scores(await asyncio.gather(*results), log_extra)


def _scores(results: Sequence[Any], log_extra: Callable[..., None]) -> list[Any]:
    """The numbers among the results; the other values of dicts are logged."""
    others = {name for result in results if isinstance(result, dict) for name in result if name != "score"}
    for name in sorted(others, key=str):
        log_extra(name, [result.get(name) if isinstance(result, dict) else None for result in results])
    return [result["score"] if isinstance(result, dict) else result for result in results]


def _row(arguments: Mapping[str, Any], row: int) -> dict[str, Any]:
    return {name: value if name in WITHOUT_ROWS else value[row] for name, value in arguments.items()}


def _verl_row(arguments: Mapping[str, Any], row: int) -> dict[str, Any]:
    columns = _row(arguments, row)
    model = columns.get("reward_model")
    if "ground_truth" not in columns and isinstance(model, dict) and "ground_truth" in model:
        columns["ground_truth"] = model["ground_truth"]
    elif "ground_truth" not in columns and "answer" in columns:
        columns["ground_truth"] = columns["answer"]
    text = columns["completions"]
    return {"extra_info": None} | columns | {"solution_str": text if isinstance(text, str) else text[-1]["content"]}


def _verifiers_row(arguments: Mapping[str, Any], row: int) -> dict[str, Any]:
    columns = _row(arguments, row)
    named = {"task": "default", "info": {}} | columns
    if isinstance(named["info"], str):  # it may be JSON in the data
        with contextlib.suppress(ValueError):
            named["info"] = json.loads(named["info"])
    named |= {"prompt": columns.pop("prompts"), "completion": columns.pop("completions")}
    del named["prompts"], named["completions"]
    state = {name: named[name] for name in ("prompt", "completion", "answer", "task", "info") if name in named}
    return {"state": state} | named


def _asked_for(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function takes. Raises TypeError if it needs another one."""
    parameters = inspect.signature(function).parameters
    variable = {parameter.kind for parameter in parameters.values()} & {VAR_KEYWORD, VAR_POSITIONAL}
    for name, parameter in parameters.items():
        if name not in given and parameter.default is parameter.empty and parameter.kind not in variable:
            there = ", ".join(name for name in given if name not in WITHOUT_ROWS)
            raise TypeError(f"it asks for {name!r}, but the data has only {there}")
    return {name: value for name, value in given.items() if VAR_KEYWORD in variable or name in parameters}
