"""How a reward function is called under a deadline: in this process or, by its name, in one of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from covey.llm.reward_worker import CallFailed, WrongResults, call_function, one_line


class Hanging(Exception):
    """A function hangs in this process, where nothing can stop it."""


class Caller(Protocol):
    """Calls a reward function under a deadline."""

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> list[Any]:
        """One float or None per completion; with `step_counts` one list of so many floats or None.

        Raises:
            CallFailed: for this call.
            WrongResults, Hanging: if there is no point in another call.
        """

    def close(self) -> None:
        """Let go of what the calls needed."""


class InProcess:
    """Calls a function in a thread of this process. One that hangs cannot be killed there, so it stops the run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> list[Any]:
        results: list[list[Any]] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call_function(self.function, arguments, global_step, step_counts))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True, name="covey-reward")
        thread.start()
        thread.join(seconds)
        if results:
            return results[0]
        if not errors:
            raise Hanging(
                f"took longer than {seconds:g} s inside this process, where it cannot be stopped; raise its "
                f"timeout_seconds, or name it as file.py:function to run it in a process of its own"
            )
        if isinstance(errors[0], WrongResults):
            raise errors[0]
        raise CallFailed(one_line(errors[0]))

    def close(self) -> None:
        """Nothing is held between calls."""
