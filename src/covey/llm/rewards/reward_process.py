"""A reward function in a process of its own (`worker.py`), called by its name under a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from covey.config.named_modules import search_path
from covey.llm.rewards import worker
from covey.llm.rewards.reward_call import (
    InvalidRewardOutput,
    Log,
    Results,
    RewardCallError,
    RewardTimeout,
    checked_positions,
    checked_values,
    one_line,
)
from covey.llm.rewards.supervised_process import MOST_OUTPUT_CHARACTERS, SupervisedProcess

LOAD_LEAST_SECONDS = 10.0  # to import the function's file, which may import torch; longer if a call's deadline is

T = TypeVar("T")


class RewardProcess:
    """A function named `file.py:function` or `module:function`, in a process of its own (`worker.py`).

    The process starts at the first call and again after it was ended. It ends at `close`, at any end of the run's
    process, and after a call that timed out, ended the process or sent an unexpected reply. A call that fails in a
    process that answered before is repeated once in a new one, because an earlier call may be the cause. A call that
    timed out is not repeated.

    Output of the function is printed to stderr.
    """

    def __init__(
        self, function: str, load_seconds: float = LOAD_LEAST_SECONDS, *, repeat: bool = True, memory_mib: int = 0
    ) -> None:
        """The function is loaded at the first call.

        Args:
            function: its name.
            load_seconds: deadline of importing its file, at least 10.
            repeat: repeat a call that fails in a process that answered before.
            memory_mib: limit of the process's address space, which then cannot write files either; 0: none.
        """
        self.function = function
        self.repeat, self.memory_mib = repeat, memory_mib
        self.load_seconds = max(load_seconds, LOAD_LEAST_SECONDS)
        self._worker: _Worker | None = None

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """Call the reward function with a deadline; arguments and results as in `call_function`.

        Raises:
            RewardCallError: if the function raised or its process ended. RewardTimeout: at the deadline.
            InvalidRewardOutput: if it returned anything else.
        """
        counts = None if step_counts is None else list(step_counts)
        request = {"arguments": arguments, "global_step": global_step, "step_counts": counts}
        count = len(arguments["completions"])
        return self._ask(request, seconds, lambda reply: _results(reply, count, counts))

    def call_on_text(self, text: str, seconds: float) -> list[int]:
        """Call the boundary function with a deadline; errors as in `call`."""
        return self._ask({"text": text}, seconds, lambda reply: checked_positions(reply["results"], len(text)))

    def close(self) -> None:
        """End the process and all processes that it started."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def interrupt(self) -> None:
        """End the running call of another thread, which fails. Without effect between calls."""
        worker = self._worker
        if worker is not None:
            worker.interrupt()

    def _ask(self, request: dict[str, Any], seconds: float, read: Callable[[dict[str, Any]], T]) -> T:
        answered_before = self._worker is not None and self.repeat
        try:
            return self._ask_once(request, seconds, read)
        except RewardTimeout:
            raise
        except RewardCallError:
            if not answered_before:
                raise
        self.close()
        return self._ask_once(request, seconds, read)

    def _ask_once(self, request: dict[str, Any], seconds: float, read: Callable[[dict[str, Any]], T]) -> T:
        if self._worker is None:
            path = search_path(self.function)
            self._worker = _Worker()
            try:
                loaded = self._exchange(
                    {"load": self.function, "path": path, "memory_mib": self.memory_mib}, self.load_seconds
                )
            except RewardTimeout as error:
                raise RewardCallError(
                    f"cannot be loaded: importing its file {error}; raise its timeout_seconds"
                ) from None
            if "failed" in loaded:
                self.close()
                raise RewardCallError(f"cannot be loaded: {loaded['failed']}")
        reply = self._exchange(request, seconds)
        if reply["last"]:
            self.close()
        if "wrong" in reply:
            raise InvalidRewardOutput(reply["wrong"])
        if "failed" in reply:
            raise RewardCallError(reply["failed"])
        return read(reply)

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its reply. On a failure the process is ended, because it may reply later."""
        assert self._worker is not None
        worker, number = self._worker, secrets.token_hex(8)
        try:
            line = json.dumps(request | {"id": number}, default=_in_json).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardCallError(f"its arguments cannot be sent to its process as JSON: {one_line(error)}") from None
        try:
            return _reply_to(number, worker.exchange(line, seconds))
        except (EOFError, BrokenPipeError):
            self.close()
            raise RewardCallError(worker.last_words()) from None
        except TimeoutError:
            self.close()
            raise RewardTimeout(f"took longer than {seconds:g} s") from None
        except BaseException:
            self.close()
            raise


def _in_json(value: Any) -> Any:
    """A number or array of NumPy or torch, in a column from Python, as numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _reply_to(number: str, line: bytes) -> dict[str, Any]:
    """Parse the reply with the number of the request; any other line was not written by the worker."""
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(line)
        if isinstance(reply, dict) and reply.get("id") == number:
            return reply
    raise RewardCallError(
        "something other than a reply came from its process: a function must not write to files that it did not open"
    )


def _results(reply: dict[str, Any], count: int, step_counts: Sequence[int] | None) -> Results:
    """The results in a reply, checked again, because the function could change the process that checked them.

    Raises:
        InvalidRewardOutput: as `call_function`.
    """
    log = Log(count)
    for name, numbers in reply["metrics"].items():
        for number in numbers:
            log.log_metric(name, number)
    for column, values in reply["extras"].items():
        log.log_extra(column, values)
    return Results(checked_values(reply["results"], count, step_counts), log.metrics, log.extras)


class _Worker(SupervisedProcess):
    """A started process with the pipes to it."""

    def __init__(self) -> None:
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        super().__init__(worker.__file__, (requests, replies))
        os.set_blocking(self.requests, False)

    def exchange(self, line: bytes, seconds: float) -> bytes:
        """Send a line and return the next one, under one deadline; output in the meantime is printed to stderr.

        Raises:
            TimeoutError: at the deadline. EOFError, BrokenPipeError: if the other end is closed.
        """
        deadline = time.monotonic() + seconds
        to_write, reply, whole = memoryview(line), bytearray(), False
        self.output.left = MOST_OUTPUT_CHARACTERS
        with selectors.DefaultSelector() as selector:
            selector.register(self.requests, selectors.EVENT_WRITE)
            selector.register(self.replies, selectors.EVENT_READ)
            selector.register(self.output.descriptor, selectors.EVENT_READ)
            while not whole:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, _ in selector.select(left):
                    if key.fd == self.requests:
                        to_write = to_write[os.write(self.requests, to_write) :]
                        if not to_write:
                            selector.unregister(self.requests)
                    elif key.fd == self.replies:
                        read = os.read(self.replies, 1 << 16)
                        if not read:
                            raise EOFError
                        reply += read
                        # Longer than any valid reply, so it is refused.
                        whole = b"\n" in read or len(reply) > worker.MOST_REPLY_BYTES
                    elif not self.output.pass_on():
                        selector.unregister(self.output.descriptor)
        return bytes(reply)

    def close_pipes(self) -> None:
        os.close(self.requests)
        os.close(self.replies)
