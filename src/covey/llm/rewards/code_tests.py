"""The tests of a program, read from a column of the data."""

import ast
import builtins
import json
import symtable
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMS = (
    'a list of {"input": ..., "output": ...} or {"args": [...], "expected": ...}, {"inputs": [...], "outputs": [...]}, '
    "a list of assert statements, or the text of a program with check(candidate)"
)
_NOTHING = object()


@dataclass(frozen=True)
class StdinCase:
    """A program gets `input` on stdin and must print `output`."""

    input: str
    output: str


@dataclass(frozen=True)
class CallCase:
    """A call of the function must return `expected`."""

    args: Sequence[Any]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StdinTests:
    """Cases that each run the whole program."""

    cases: Sequence[StdinCase]


@dataclass(frozen=True)
class CallTests:
    """Cases that each call one function of the program."""

    function: str
    cases: Sequence[CallCase]


@dataclass(frozen=True)
class CheckTests:
    """A test program: `check(candidate)`, or assert statements if `entry_point` is empty. It counts as one case."""

    source: str
    entry_point: str
    functions: tuple[str, ...]  # names that refer to the program under test
    others: tuple[str, ...] = ()  # names that do so unless the prefix defines them


Tests = StdinTests | CallTests | CheckTests


def read_tests(value: Any, entry_point: str | None = None) -> Tests:
    """Read the tests of one row.

    Args:
        value: the column's value, in one of the forms of `FORMS`; lists and dicts also as JSON text.
        entry_point: name of the function under test; stdin cases and assert statements need none.

    Raises:
        ValueError: if it has another form; one line that names the fix.
    """
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, str):
        if not entry_point:
            raise ValueError("the tests call check(candidate), so the data needs a column 'entry_point'")
        return CheckTests(value, entry_point, (entry_point,), _names(value, entry_point)[1])
    if isinstance(value, Mapping):
        value, entry_point = _rows_of(value), value.get("fn_name") or entry_point
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"the tests are {str(value)!r:.60}: give {FORMS}")
    if all(isinstance(case, str) for case in value):
        source = "\n".join(value)
        return CheckTests(source, "", *_names(source, entry_point))
    if not all(isinstance(case, Mapping) for case in value):
        raise ValueError(f"the tests hold {str(value[0])!r:.60}: give {FORMS}")
    if any("args" in case for case in value):
        return CallTests(_needed(entry_point), [_call_case(case) for case in value])
    if entry_point and all("fn_input" in case for case in value):
        return CallTests(entry_point, [CallCase(case["fn_input"], case["fn_output"]) for case in value])
    return StdinTests([_stdin_case(case) for case in value])


def _from_text(text: str) -> Any:
    """The list or dict that a JSON text holds; any other text as it is, if it is a program with check."""
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are neither Python nor JSON ({error}): give {FORMS}") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        raise ValueError(f"the tests define no function check: give {FORMS}")
    return text


def _rows_of(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cases from {"inputs": [...], "outputs": [...]}, the form of APPS; with "fn_name" they are calls."""
    inputs, outputs = value.get("inputs"), value.get("outputs")
    lists = isinstance(inputs, Sequence) and isinstance(outputs, Sequence)
    if not lists or len(inputs) != len(outputs):  # type: ignore[arg-type]
        raise ValueError(f"the tests need inputs and outputs of the same length: give {FORMS}")
    names = ("fn_input", "fn_output") if value.get("fn_name") else ("input", "output")
    return [dict(zip(names, pair, strict=True)) for pair in zip(inputs, outputs, strict=True)]  # type: ignore[arg-type]


def _needed(entry_point: str | None) -> str:
    if not entry_point:
        raise ValueError("the tests call a function, so the data needs a column 'entry_point' with its name")
    return entry_point


def _call_case(case: Mapping[str, Any]) -> CallCase:
    args, kwargs, expected = case.get("args"), case.get("kwargs") or {}, case.get("expected", _NOTHING)
    if not isinstance(args, Sequence) or isinstance(args, str) or not isinstance(kwargs, Mapping):
        raise ValueError(f'a test is {str(case)!r:.60}: "args" is a list, and "kwargs" a dict')
    if expected is _NOTHING:
        raise ValueError(f'a test is {str(case)!r:.60}: it has no "expected"')
    return CallCase(args, expected, kwargs)


def _stdin_case(case: Mapping[str, Any]) -> StdinCase:
    given, expected = (_text_of(case.get(name)) for name in ("input", "output"))
    if given is None or expected is None:
        raise ValueError(f'a test is {str(case)!r:.60}: it needs "input" and "output", two texts; give {FORMS}')
    return StdinCase(given, expected)


def _text_of(value: Any) -> str | None:
    """A text, or the lines of a list of texts."""
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else None


def _names(source: str, entry_point: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that tests use and do not define: those of the program, and those of it or of its prefix.

    The first are the function under test or, if the data does not name it, all that the tests call.
    """
    try:
        tree, tables = ast.parse(source), [symtable.symtable(source, "tests", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not Python ({error})") from None
    used: dict[str, None] = {}
    own = set(dir(builtins))
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                used[symbol.get_name()] = None
            if symbol.is_global() and (symbol.is_assigned() or symbol.is_imported()):
                own.add(symbol.get_name())
    outside = [name for name in used if name not in own]
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    functions = (entry_point,) if entry_point else tuple(name for name in outside if name in calls)
    if not functions and not outside:
        raise ValueError("the tests call no function of the program")
    return functions, tuple(name for name in outside if name not in functions)
