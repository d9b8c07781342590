"""Calls reward functions under a deadline; a function of the user's Python program in a thread of this process."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from covey.llm.rewards.adapters import adapted
from covey.llm.rewards.process_state import ProcessState
from covey.llm.rewards.reward_call import (
    InvalidRewardOutput,
    Results,
    RewardCallError,
    call_function,
    one_line,
)

T = TypeVar("T")
_STATE = threading.Lock()  # reading the process state changes it for a moment


class RewardHung(Exception):
    """A function hangs in this process, so it cannot be stopped."""


class RewardRunner(Protocol):
    """Calls a reward function under a deadline."""

    @property
    def workers(self) -> int:
        """Number of calls that can run side by side."""

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """One float or None per completion; with `step_counts` one list of that length or None.

        Raises:
            RewardCallError: if this call failed.
            InvalidRewardOutput, RewardHung: if every further call would fail too.
        """

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results] | None:
        """Start a call in the background; None if the function is called only after the step has been sampled."""

    def close(self) -> None:
        """Release the resources of the calls."""


class InProcess:
    """Calls a function in a thread of this process. A function that hangs cannot be killed, so it ends the run.

    The function gets a copy of its arguments, and its changes of the process state are reverted (`ProcessState`).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        results: list[Results] = []
        errors: list[Exception] = []
        process = os.getpid()
        with _STATE:
            state = ProcessState()
        own = {name: _copied(value) for name, value in arguments.items()}

        def work() -> None:
            try:
                results.append(call_function(adapted(self.function, own), own, global_step, step_counts))
            except InvalidRewardOutput as error:
                errors.append(error)
            except BaseException as error:
                errors.append(RewardCallError(one_line(error)))  # in this thread, because its str() may hang too
            finally:
                if os.getpid() != process:  # a child that the function forked must not continue as a second run
                    os._exit(0)

        thread = threading.Thread(target=work, daemon=True, name="covey-reward")
        thread.start()
        thread.join(seconds)
        with _STATE:
            state.restore()
        if results:
            return results[0]
        if not errors:
            raise RewardHung(
                f"took longer than {seconds:g} s inside this process, where it cannot be stopped; raise its "
                f"timeout_seconds, or name it as file.py:function to run it in a process of its own"
            )
        raise errors[0]

    workers = 1

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results] | None:
        """Start a coroutine function in the background, because it waits for most of the time. Another function would
        compete with the sampler for Python's interpreter, so `call` calls it when its turn comes.
        """
        if not (
            inspect.iscoroutinefunction(self.function)
            or inspect.iscoroutinefunction(getattr(self.function, "__call__", None))  # noqa: B004 -- of an object
        ):
            return None
        return in_thread(partial(self.call, arguments, global_step, seconds, step_counts))

    def close(self) -> None:
        """Does nothing: there are no resources between calls."""


def in_thread(call: Callable[[], T]) -> Future[T]:
    """The result of a call in a thread of its own, which does not keep an interrupted run alive."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="covey-reward-call").start()
    return future


def _copied(value: Any) -> Any:
    """Copy lists and dicts, which belong to the data, so that a function cannot change later calls."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value
