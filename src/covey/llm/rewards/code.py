"""The built-in reward `code`: the program in a completion passes its hidden tests."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from covey.config import RewardConfig
from covey.config.machine import processors
from covey.llm.rewards.code_judge import Judge, Verdict
from covey.llm.rewards.code_tests import Tests, read_tests
from covey.llm.rewards.final_answer import completion_text
from covey.llm.rewards.reward_call import Results
from covey.llm.rewards.runner import RewardRunner, in_thread
from covey.llm.rewards.sandbox.backends import choose_sandbox
from covey.llm.rewards.sandbox.harness import NotPlain
from covey.llm.rewards.sandbox.limits import Limits
from covey.llm.rewards.sandbox.session import SandboxFailure
from covey.runtime.worker.child import one_line
from covey.runtime.worker.process import CallError

_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}+|~{3,}+)[^\n`]*$", re.MULTILINE)
TESTS_COLUMN = "tests"


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


@dataclass(frozen=True)
class CodeOptions:
    """Options of the reward; the fields of the same names in `RewardConfig`."""

    partial: bool = False
    tests_column: str = TESTS_COLUMN
    time_limit_seconds: float = 5.0
    memory_mb: int = 256
    process_limit: int = 4
    workers: int | None = None  # as many as the machine has processors
    unsafe_without_sandbox: bool = False


class CodeRunner(RewardRunner):
    """Grades programs side by side.

    Each program has its own limits, so a call needs no deadline: it takes at most as long as its programs.
    """

    def __init__(self, options: CodeOptions) -> None:
        """Find a sandbox and try it.

        Raises:
            ConfigError: if there is none.
        """
        self.options = options
        limits = Limits(
            seconds=options.time_limit_seconds, memory_mb=options.memory_mb, processes=options.process_limit
        )
        sandbox = choose_sandbox(unsafe=options.unsafe_without_sandbox)
        self._judge = Judge(sandbox, limits, every_case=options.partial)
        self._executor = ThreadPoolExecutor(options.workers or processors(), thread_name_prefix="covey-program")

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
        tests = arguments.get(self.options.tests_column)
        if tests is None:
            raise CallError(
                f"the data has no column {self.options.tests_column!r} with tests; set tests_column in [[rewards]]"
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
        return verdict.share if self.options.partial else float(verdict.is_right)

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


def code_runner(config: RewardConfig) -> CodeRunner:
    """The runner with the options of a [[rewards]] table; errors as of `CodeRunner`."""
    options = {option.name: getattr(config, option.name) for option in fields(CodeOptions)}
    return CodeRunner(CodeOptions(**options | {"workers": config.process_count}))


def code(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 if the program in the completion passes all its tests, else 0; None if it could not be judged.

    The tests are in the column `tests` (`code_tests.read_tests`), with `entry_point` and `code_prefix` where they need
    them. Programs run in a sandbox (`sandbox.backends`), with the limits of `CodeOptions`.

    Raises:
        ConfigError: if there is no sandbox.
        CallError: if the column is missing.
    """
    runner = CodeRunner(CodeOptions())
    try:
        return runner.call({"completions": completions, **columns}, 0, 0.0).values
    finally:
        runner.close()
