"""The built-in reward `code`: the program in a completion passes its hidden tests, which this process judges.

Inputs go into the sandbox and results come out. Expected results never go in, so a program cannot find them, and
nothing that it prints, returns or changes is a verdict. A test program (`check(candidate)`) runs in a second sandbox,
where `candidate` asks this process, which asks the program's sandbox: the assert statements and the program share no
process.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import re
import symtable
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from covey.config import RewardConfig
from covey.llm.rewards.final_answer import completion_text
from covey.llm.rewards.reward_call import Results
from covey.llm.rewards.runner import RewardRunner, in_thread
from covey.llm.rewards.sandbox.backends import choose_sandbox
from covey.llm.rewards.sandbox.harness import DEEPEST, NotPlain, decode, encode
from covey.llm.rewards.sandbox.session import Limits, ProgramFault, Sandbox, SandboxFailure, Session, TimeLimit
from covey.runtime.worker.child import one_line, one_printable_line
from covey.runtime.worker.process import CallError

# ---- the tests of a program, in a column of the data ----

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


_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}+|~{3,}+)[^\n`]*$", re.MULTILINE)


def extract_program(text: str) -> str:
    """The content of the last fenced code block of a text, or the whole text if it has none.

    A block without an end, as in a completion that the token limit cut, ends with the text.
    """
    program, begin, fence = text, -1, ""
    for match in _FENCE.finditer(text):
        if begin < 0:
            begin, fence = match.end() + 1, match["fence"]
        elif match["fence"].startswith(fence) and not match[0].strip().strip("`~"):
            program, begin = text[begin : match.start()], -1
    return text[begin:] if begin >= 0 else program


class CodeRunner(RewardRunner):
    """Grades programs side by side.

    Each program has its own limits, so a call needs no deadline: it takes at most as long as its programs.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Find a sandbox and try it.

        Raises:
            ConfigError: if there is none.
        """
        self.config = config
        limits = Limits(seconds=config.time_limit_seconds, memory_mb=config.memory_mb, processes=config.process_limit)
        sandbox = choose_sandbox(unsafe=config.unsafe_without_sandbox)
        self._judge = Judge(sandbox, limits, every_case=config.partial)
        self._executor = ThreadPoolExecutor(config.process_count, thread_name_prefix="covey-program")

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        """As `call`, in the background."""
        return in_thread(partial(self.call, arguments, global_step, seconds))

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """One value for each completion; a program that could not be judged has None and an entry in `errors`.

        A program that several completions of a prompt share is run once.

        Raises:
            CallError: if the data has no column with tests.
        """
        completions = arguments["completions"]
        tests = arguments.get(self.config.tests_column)
        if tests is None:
            raise CallError(
                f"the data has no column {self.config.tests_column!r} with tests; set tests_column in [[rewards]]"
            )
        nothing = [None] * len(completions)
        columns = [arguments.get(name) or nothing for name in ("entry_point", "code_prefix")]
        results = self._grade_each(completions, tests, *columns)
        verdicts = [result for result in results if isinstance(result, Verdict)]
        return Results(
            values=[self._value(result) if isinstance(result, Verdict) else None for result in results],
            metrics={"passed_share": [verdict.share for verdict in verdicts]} if verdicts else {},
            extras={"verdict": [result.text if isinstance(result, Verdict) else result for result in results]},
            errors={row: result for row, result in enumerate(results) if isinstance(result, str)},
        )

    def close(self) -> None:
        """End the workers, after the programs that are running."""
        self._executor.shutdown(cancel_futures=True)

    def _value(self, verdict: Verdict) -> float:
        return verdict.share if self.config.partial else float(verdict.is_right)

    def _grade_each(self, completions: Sequence[Any], *columns: Sequence[Any]) -> list[Verdict | str]:
        """`_grade` of every row, side by side; rows with the same program and the same objects in `columns` share one.

        The rows of a prompt have the same objects, because they get its columns.
        """
        started: dict[Hashable, Future[Verdict | str]] = {}
        rows: list[Future[Verdict | str]] = []
        for completion, *values in zip(completions, *columns, strict=True):
            program = extract_program(completion_text(completion))
            key = (program, *map(id, values))
            if key not in started:
                started[key] = self._executor.submit(self._grade, program, *values)
            rows.append(started[key])
        return [row.result() for row in rows]

    def _grade(self, program: str, tests: Any, entry_point: Any, prefix: Any) -> Verdict | str:
        """The verdict on a program, or why there is none."""
        try:
            read: Tests = read_tests(tests, entry_point)
            return self._judge.judge(program, read, prefix or "")
        except (SandboxFailure, ValueError, NotPlain) as error:
            return str(error)
        except OSError as error:  # no process or no descriptor left on this machine
            return f"the sandbox failed: {one_line(error)}"


def code(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 if the program in the completion passes all its tests, else 0; None if it could not be judged.

    The tests are in the column `tests` (`code_tests.read_tests`), with `entry_point` and `code_prefix` where they need
    them. Programs run in a sandbox (`sandbox.backends`), with the default limits of `RewardConfig`.

    Raises:
        ConfigError: if there is no sandbox.
        CallError: if the column is missing.
    """
    runner = CodeRunner(RewardConfig(name="code"))
    try:
        return runner.call({"completions": completions, **columns}, 0, 0.0).values
    finally:
        runner.close()


Source = dict[str, str]  # "prefix" and "source", the text of the program
MOST_CASES = 10  # that may take as long as the limit: all cases of a program together have the time of so many
SPARE_CPU_SECONDS = 2  # for the start of the interpreter, and for the second between the two limits


@dataclass(frozen=True)
class Verdict:
    """Result of a program."""

    passed: int  # cases
    total: int
    text: str  # one line for the user: "passed", or what went wrong first

    @property
    def share(self) -> float:
        return self.passed / self.total

    @property
    def is_right(self) -> bool:
        return self.passed == self.total


class Judge:
    """Judges programs in a sandbox.

    Args:
        sandbox: runs the programs.
        limits: of one program; `seconds` is the wall time of one case, or of a whole test program.
        every_case: run the cases after the first that fails, which the share of passed cases needs.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, *, every_case: bool = True) -> None:
        self.sandbox, self.limits, self.every_case = sandbox, limits, every_case

    def judge(self, program: str, tests: Tests, prefix: str = "") -> Verdict:
        """Run a program on its tests.

        Args:
            program: source text.
            tests: what it must do.
            prefix: source text before the program, such as imports; a test program sees it too.

        Raises:
            SandboxFailure: if the sandbox or a test program failed, and not the program.
        """
        source = {"prefix": prefix, "source": program}
        if isinstance(tests, CheckTests):
            return self._judge_check(source, tests)
        total = len(tests.cases)
        budget = _Budget(self.limits.seconds, total)
        if isinstance(tests, StdinTests):
            return self._judge_cases(partial(self._run_case, source, tests, budget), budget, total)
        with _Calls(self, source, tests, budget) as run:
            return self._judge_cases(run, budget, total)

    def _judge_cases(self, run: Callable[[int], str], budget: _Budget, total: int) -> Verdict:
        """Run cases; `run` returns what is wrong with the result of one, or an empty text."""
        passed, fault = 0, ""
        for number in range(total):
            try:
                wrong = run(number)
            except ProgramFault as error:
                wrong = str(error)
                if isinstance(error, TimeLimit):
                    wrong = wrong if budget.left > 0 else f"all cases took longer than {budget.total:g} s"
                    return Verdict(passed, total, fault or f"case {number + 1}: {wrong}")
            passed += not wrong
            fault = fault or (wrong and f"case {number + 1}: {wrong}")
            if wrong and not self.every_case:
                break
        return Verdict(passed, total, fault or "passed")

    def _run_case(self, source: Source, tests: StdinTests, budget: _Budget, number: int) -> str:
        case, limits = tests.cases[number], self._limits(self.limits.seconds)
        most = limits.output_bytes + 4 * len(case.output)
        given = case.input.encode("utf-8", "replace")
        with Session(self.sandbox, limits) as session, budget.case() as seconds:
            printed = session.run_script(source["source"], given, most, source["prefix"], seconds)
        return "" if same_output(case.output, printed) else "wrong output"

    def _limits(self, seconds: float) -> Limits:
        """The limits of a process that may run for this wall time."""
        return replace(self.limits, cpu_seconds=math.ceil(seconds) + SPARE_CPU_SECONDS)

    # ---- test programs ----

    def _judge_check(self, source: Source, tests: CheckTests) -> Verdict:
        """Pass calls of the test program on to the program under test, until the test program has its verdict."""
        limits, fault = self._limits(self.limits.seconds), ""
        late = f"took longer than {self.limits.seconds:g} s"
        frame: dict[str, Any] = {"mode": "check", "prefix": source["prefix"], **asdict(tests)}
        with Session(self.sandbox, limits) as program, Session(self.sandbox, limits) as checker:
            deadline = time.monotonic() + self.limits.seconds
            try:
                load(program, source, self.limits.seconds)
                while True:
                    try:
                        message = checker.ask(frame, deadline - time.monotonic())
                    except ProgramFault as error:  # the values that it got may be too large for it
                        return Verdict(0, 1, fault or (late if isinstance(error, TimeLimit) else f"the tests {error}"))
                    if "call" not in message:
                        return _verdict_of(message, fault)
                    call = {"function": message["call"], "args": message["args"], "kwargs": message["kwargs"]}
                    reply = program.ask(call, deadline - time.monotonic())
                    kind, text = error_of(reply)
                    fault = fault or (f"{kind}: {text}" if kind else "")
                    frame = {"error": [kind, text]} if kind else {"value": reply.get("value")}
            except ProgramFault as error:
                return Verdict(0, 1, late if isinstance(error, TimeLimit) else str(error))


class _Budget:
    """Wall time that a program may use: that of a case, and of all its cases together."""

    def __init__(self, seconds: float, cases: int) -> None:
        self.seconds = seconds
        self.left = self.total = seconds * min(cases, MOST_CASES)

    @contextlib.contextmanager
    def case(self) -> Iterator[float]:
        """The seconds for the program's next work, whose time is counted."""
        began = time.monotonic()
        try:
            yield min(self.seconds, self.left)
        finally:
            self.left -= time.monotonic() - began


class _Calls:
    """Calls one function of a program, in a process that is started again after it ended."""

    def __init__(self, judge: Judge, source: Source, tests: CallTests, budget: _Budget) -> None:
        self.limits = judge._limits(budget.total)  # of all cases, because they share a process
        self.sandbox, self.source, self.tests, self.budget = judge.sandbox, source, tests, budget
        self._session: Session | None = None

    def __call__(self, number: int) -> str:
        """What is wrong with the result of one case; empty if it is right."""
        case = self.tests.cases[number]
        call = {"function": self.tests.function, "args": encode(list(case.args)), "kwargs": encode(dict(case.kwargs))}
        try:
            if self._session is None:
                self._session = Session(self.sandbox, self.limits)
                with self.budget.case() as seconds:
                    load(self._session, self.source, seconds)
            with self.budget.case() as seconds:
                reply = self._session.ask(call, seconds)
        except ProgramFault:
            self.close()
            raise
        kind, text = error_of(reply)
        if kind:
            return f"{kind}: {text}"
        return "" if "value" in reply and matches(case.expected, reply["value"]) else "wrong result"

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def load(session: Session, source: Source, seconds: float) -> None:
    """Load a program whose functions are called afterwards.

    Raises:
        ProgramFault: if it raises, or does not end.
    """
    reply = session.ask({"mode": "functions", **source}, seconds)
    kind, text = error_of(reply)
    if kind or reply != {"loaded": True}:
        raise ProgramFault(f"{kind or 'no reply'}: {text}")


def error_of(reply: dict[str, Any]) -> tuple[str, str]:
    """Type and text of the exception in a reply, in one printable line; two empty texts if there is none."""
    error = reply.get("error")
    if error is None:
        return "", ""
    if not isinstance(error, list) or len(error) != 2 or not all(isinstance(part, str) for part in error):
        return "Error", "unreadable"
    return one_printable_line(error[0][:60]) or "Error", one_printable_line(error[1][:300])


def _verdict_of(message: dict[str, Any], fault: str) -> Verdict:
    """The verdict in the last message of a test program."""
    if message == {"passed": True}:
        return Verdict(1, 1, "passed")
    if "failed" in message:
        kind, text = error_of({"error": message["failed"]})
        return Verdict(0, 1, fault or f"{kind}: {text}".rstrip(": "))
    kind, text = error_of({"error": message.get("broken", "")})
    raise SandboxFailure(f"the tests cannot be run: {kind}: {text}")


# ---- comparisons with the expected results ----

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-9  # of floating-point results


def matches(expected: Any, item: Any) -> bool:
    """True if an encoded result (`harness.encode`) is the expected value.

    Numbers are equal as in Python, and where a float is expected within a relative error of 1e-6; NaN equals only an
    expected NaN. A list equals a tuple with the same items, and an integer as a key its text, because JSON has neither
    tuples nor such keys. Texts, booleans and None need the same type.

    The result comes from an untrusted program, and it never becomes a dict or a set: hashing chosen integers takes a
    time that is quadratic in their number. Keys and the items of sets are compared by a text (`_text`).
    """
    try:
        return _matches(expected, item)
    except (NotPlain, OverflowError, RecursionError):
        return False


def _matches(expected: Any, item: Any) -> bool:
    if expected is None or isinstance(expected, (bool, str)):
        return type(item) is type(expected) and item == expected
    tag, parts = (item[0], item[1:]) if isinstance(item, list) and item else (None, [])
    if isinstance(expected, (int, float, complex)):
        return _same_number(expected, item, tag)
    if isinstance(expected, (list, tuple)):
        return tag in ("list", "tuple") and len(parts) == len(expected) and all(map(_matches, expected, parts))
    if isinstance(expected, dict):
        return tag == "dict" and _same_dict(expected, parts)
    if isinstance(expected, (set, frozenset)):
        return tag in ("set", "frozenset") and len(parts) == len(expected) and _text(encode(expected)) == _text(item)
    return isinstance(expected, bytes) and tag == "bytes" and bool(decode(item) == expected)


def _same_number(expected: complex, item: Any, tag: Any) -> bool:
    if type(item) is not int and tag not in ("int", "float", "complex"):
        return False
    number = decode(item)
    if not isinstance(expected, float) or isinstance(number, complex):
        return bool(number == expected)
    if math.isnan(expected) or math.isnan(number):
        return math.isnan(expected) and math.isnan(number)
    return math.isclose(number, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def _same_dict(expected: dict[Any, Any], pairs: Sequence[Any]) -> bool:
    if len(pairs) != len(expected) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    wanted = {_text(encode(key)): value for key, value in expected.items()}
    found = {}
    for key, value in pairs:
        name = _text(key)
        found[name if name in wanted or type(key) is not int else _text(str(key))] = value
    return wanted.keys() == found.keys() and all(_matches(value, found[name]) for name, value in wanted.items())


def _text(item: Any, depth: int = 0) -> str:
    """A text that two encoded values share if, and only if, they are equal.

    Raises:
        NotPlain: for a value that can be neither a key nor in a set, or that `encode` does not write.
    """
    if depth > DEEPEST:
        raise NotPlain("nested too deeply")
    if isinstance(item, list) and item and item[0] in ("list", "tuple", "set", "frozenset"):
        parts = [_text(part, depth + 1) for part in item[1:]]
        is_set = item[0] in ("set", "frozenset")
        return f"{'set' if is_set else 'list'}({','.join(sorted(set(parts)) if is_set else parts)})"
    if isinstance(item, list) and (not item or item[0] not in ("int", "float", "complex", "bytes")):
        raise NotPlain("neither a key nor in a set")
    value = decode(item)
    if isinstance(value, complex):
        return _text(["float", value.real.hex()]) if not value.imag else f"{value.real.hex()}+{value.imag.hex()}j"
    if isinstance(value, float):
        return hex(int(value)) if value.is_integer() else value.hex()
    return hex(value) if type(value) is int else ascii(value)


def same_output(expected: str, printed: bytes) -> bool:
    """True if the lines are the same, apart from white space at the end of lines and empty lines at the end."""
    try:
        text = printed.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return _lines(text) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]
