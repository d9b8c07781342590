"""Grades completions one by one in several worker processes, so that one that hangs or dies costs itself alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.llm.rewards.reward_call import FAILURES_ALLOWED, InvalidRewardOutput, Results, RewardCallError, one_line
from covey.llm.rewards.runner import InProcess, RewardProcess

LOAD_SECONDS = 60.0  # deadline of importing the function, with all workers at once
NOT_SENT = ("prompts", "completion_ids")  # arguments that a function in a pool does not get


class RewardPool:
    """Calls a function for one completion at a time, in several processes side by side; implements `RewardRunner`.

    Every call has the whole deadline. A call that times out, raises or ends its process fails for its completion alone
    (`Results.errors`), and its process is replaced. If more than 20 % of the completions fail, the rest is not tried.
    """

    def __init__(
        self,
        function: str,
        workers: int,
        options: Collection[str] = (),
        shortcut: Callable[..., Any] | None = None,
        memory_mib: int = 0,
    ) -> None:
        """The processes start when they are first needed.

        Args:
            function: module:function.
            workers: number of processes.
            options: arguments that are the same for all completions; the others are lists with one entry for each.
            shortcut: a function with the same arguments, called in this process for all completions; it returns the
                reward of those that it can grade, and None for those that the function must grade.
            memory_mib: limit of the address space of each process; 0: none.
        """
        self._options = frozenset(options)
        self._shortcut = None if shortcut is None else InProcess(shortcut)
        self._slots = [
            _Slot(RewardProcess(function, LOAD_SECONDS, repeat=False, memory_mib=memory_mib)) for _ in range(workers)
        ]

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """As `RewardRunner.call`; `seconds` is the deadline of each completion."""
        count = len(arguments["completions"])
        values: list[Any] = [None] * count
        if self._shortcut is not None:
            values = self._shortcut.call(arguments, global_step, seconds).values
        grading = _Grading(
            {name: value for name, value in arguments.items() if name not in NOT_SENT},
            self._options, global_step, seconds, values, deque(row for row in range(count) if values[row] is None),
        )  # fmt: skip
        slots = self._slots[: len(grading.waiting)]
        threads = [threading.Thread(target=slot.work, args=(grading,), daemon=True) for slot in slots]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            grading.stopped.set()  # if this thread was interrupted, the others end after their present call
        if grading.invalid:
            raise grading.invalid[0]
        for row in grading.waiting:
            grading.errors[row] = (
                f"was not graded, because more than 20 % failed: {next(iter(grading.errors.values()))}"
            )
        return Results(values, {}, {}, grading.errors)

    def close(self) -> None:
        """End the processes; one that is in a call ends after it."""
        for slot in self._slots:
            slot.close()


@dataclass
class _Grading:
    """The completions of one call, which the threads of all processes take from."""

    arguments: Mapping[str, Any]
    options: frozenset[str]
    global_step: int
    seconds: float
    values: list[Any]
    waiting: deque[int]
    errors: dict[int, str] = field(default_factory=dict)  # completion -> why it has no reward
    invalid: list[InvalidRewardOutput] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def arguments_of(self, row: int) -> dict[str, Any]:
        return {name: value if name in self.options else [value[row]] for name, value in self.arguments.items()}

    def fail(self, row: int, reason: str) -> None:
        """Record a failure; if there are too many, the other completions are not tried."""
        self.errors[row] = reason
        if len(self.errors) > FAILURES_ALLOWED * len(self.values):
            self.stopped.set()


class _Slot:
    """A process, and the thread that waits for it during a call."""

    def __init__(self, process: RewardProcess) -> None:
        self._process = process
        self._lock = threading.Lock()  # held during a call
        self._closing = threading.Event()

    def work(self, grading: _Grading) -> None:
        """Grade completions until none is left, or too many failed."""
        self._closing.clear()
        with self._lock:
            while not grading.stopped.is_set() and not self._closing.is_set():
                try:
                    row = grading.waiting.popleft()
                except IndexError:
                    break
                self._grade(row, grading)
        if self._closing.is_set():
            self.close()

    def close(self) -> None:
        """End the process now, or at the end of its present call."""
        self._closing.set()
        if self._lock.acquire(blocking=False):
            try:
                self._process.close()
            finally:
                self._lock.release()

    def _grade(self, row: int, grading: _Grading) -> None:
        try:
            results = self._process.call(grading.arguments_of(row), grading.global_step, grading.seconds)
            grading.values[row] = results.values[0]
        except RewardCallError as error:
            self._process.close()
            grading.fail(row, str(error))
        except InvalidRewardOutput as error:
            grading.invalid.append(error)
            grading.stopped.set()
        except Exception as error:  # no process can be started
            grading.fail(row, one_line(error))
