"""Judges one program by its tests. The program runs in a sandbox; this process compares and decides.

Inputs go into the sandbox and results come out. Expected results never go in, so a program cannot find them, and
nothing that it prints, returns or changes is a verdict. A test program (`check(candidate)`) runs in a second sandbox,
where `candidate` asks this process, which asks the program's sandbox: the assert statements and the program share no
process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from covey.llm.rewards.code_tests import CallTests, CheckTests, StdinTests, Tests
from covey.llm.rewards.code_values import matches, same_output
from covey.llm.rewards.sandbox.harness import encode
from covey.llm.rewards.sandbox.session import Limits, ProgramFault, Sandbox, SandboxFailure, Session, TimeLimit
from covey.runtime.worker.child import one_printable_line

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
        return replace(self.limits, cpu_seconds=ceil(seconds) + SPARE_CPU_SECONDS)

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
