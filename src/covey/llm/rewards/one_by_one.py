"""Calls a function for one completion at a time, so that one that hangs or ends its process costs itself alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from covey.llm.rewards.pool import RewardPool
from covey.llm.rewards.reward_call import FAILURES_ALLOWED, InvalidRewardOutput, Results, one_line
from covey.llm.rewards.runner import InProcess

NOT_SENT = ("prompts", "completion_ids")  # arguments that the function does not get


class OneByOne:
    """A call for every completion in the processes of a pool, each with the whole deadline; implements `RewardRunner`.

    A call that times out, raises or ends its process fails for its completion alone (`Results.errors`). If more than
    20 % of the completions fail, the calls that still wait are not made.
    """

    workers = 1  # calls of the grader: the completions of one call are already side by side

    def __init__(
        self, pool: RewardPool, options: Collection[str] = (), shortcut: Callable[..., Any] | None = None
    ) -> None:
        """
        Args:
            pool: processes of the function.
            options: arguments that are the same for all completions; the others are lists with one entry for each.
            shortcut: a function with the same arguments, called in this process for all completions; it returns the
                reward of those that it can grade, and None for those that the function must grade.
        """
        self._pool, self._options = pool, frozenset(options)
        self._shortcut = None if shortcut is None else InProcess(shortcut)

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        """Start the calls; `seconds` is the deadline of each."""
        values: list[Any] = [None] * len(arguments["completions"])
        try:
            if self._shortcut is not None:
                values = self._shortcut.call(arguments, global_step, seconds).values
        except Exception as error:
            failed: Future[Results] = Future()
            failed.set_exception(error)
            return failed
        sent = {name: value for name, value in arguments.items() if name not in NOT_SENT}
        calls = {
            row: self._pool.start(
                {name: value if name in self._options else [value[row]] for name, value in sent.items()},
                global_step,
                seconds,
            )
            for row, value in enumerate(values)
            if value is None
        }
        return _Gathering(values, calls).results

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """As `start`, and wait for the results."""
        return self.start(arguments, global_step, seconds, step_counts).result()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class _Gathering:
    """Gathers the results of the calls for single completions; `results` is done when all are."""

    def __init__(self, values: list[Any], calls: Mapping[int, Future[Results]]) -> None:
        self.results: Future[Results] = Future()
        self._values, self._calls, self._left = values, calls, set(calls)
        self._errors: dict[int, str] = {}
        self._invalid: InvalidRewardOutput | None = None
        self._lock = threading.RLock()  # a cancelled call calls `_add` in the thread that cancels it
        for row, call in calls.items():
            call.add_done_callback(partial(self._add, row))
        if not calls:
            self.results.set_result(Results(values, {}, {}))

    def _add(self, row: int, call: Future[Results]) -> None:
        with self._lock:
            self._left.discard(row)
            error = None if call.cancelled() else call.exception()
            if isinstance(error, InvalidRewardOutput):
                self._invalid = error
            elif error is not None:
                self._errors[row] = str(error) if str(error) else one_line(error)
            elif not call.cancelled():
                self._values[row] = call.result().values[0]
            if self._invalid or len(self._errors) > FAILURES_ALLOWED * len(self._values):
                for left in tuple(self._left):
                    self._calls[left].cancel()
            if not self._left and not self.results.done():
                self._finish()

    def _finish(self) -> None:
        if self._invalid:
            self.results.set_exception(self._invalid)
            return
        first = next(iter(self._errors.values()), "the run ended")
        for row, call in self._calls.items():
            if call.cancelled():
                self._errors[row] = f"was not graded, because more than 20 % failed: {first}"
        self.results.set_result(Results(self._values, {}, {}, self._errors))
