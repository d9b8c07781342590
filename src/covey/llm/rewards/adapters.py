"""Reward functions with the signatures of other libraries, recognised by the names of their parameters.

verl        compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float, ...}
verifiers   f(prompt, completion, answer, **kwargs) -> float, and functions of a group: f(completions, answers) -> list

TRL's signature, `f(prompts, completions, **columns) -> list`, is covey's own. This file imports the standard library
only, so that the reward worker starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

VERL = {"data_source", "solution_str", "ground_truth"}
PLURALS = {"answers": "answer", "infos": "info", "tasks": "task"}  # of verifiers' group functions
WITHOUT_ROWS = ("trainer_state", "log_metric", "log_extra")  # arguments that are no lists


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
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        taken = dict(given)
    else:
        taken = {name: value for name, value in given.items() if name in parameters}
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL,
        )  # fmt: skip
        if not optional and name not in given:
            there = ", ".join(name for name in given if name not in WITHOUT_ROWS)
            raise TypeError(f"it asks for {name!r}, but the data has only {there}")
    return taken
