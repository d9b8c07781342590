"""Calls reward functions under a deadline: in this process or, by name, in a process of their own."""

from __future__ import annotations

import codecs
import contextlib
import inspect
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from covey.llm.rewards import worker
from covey.llm.rewards.adapters import adapted
from covey.llm.rewards.process_state import ProcessState
from covey.llm.rewards.reward_call import (
    InvalidRewardOutput,
    Log,
    Results,
    RewardCallError,
    RewardTimeout,
    call_function,
    checked_positions,
    checked_values,
    one_line,
    printable,
)

LOAD_LEAST_SECONDS = 10.0  # to import the function's file, which may import torch; longer if a call's deadline is
MOST_OUTPUT_CHARACTERS = 1 << 18  # printed output of one call; the rest is left out


T = TypeVar("T")
_STATE = threading.Lock()  # reading the process state changes it for a moment


class RewardHung(Exception):
    """A function hangs in this process, so it cannot be stopped."""


class RewardRunner(Protocol):
    """Calls a reward function under a deadline."""

    @property
    def concurrent(self) -> bool:
        """True if calls of this function may run beside those of others."""

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """One float or None per completion; with `step_counts` one list of that length or None.

        Raises:
            RewardCallError: if this call failed.
            InvalidRewardOutput, RewardHung: if every further call would fail too.
        """

    def close(self) -> None:
        """Release the resources of the calls."""


class InProcess:
    """Calls a function in a thread of this process. A function that hangs cannot be killed, so it ends the run.

    The function gets a copy of its arguments, and its changes of the process state are reverted (`ProcessState`).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @property
    def concurrent(self) -> bool:
        """True for a coroutine function. Others are called one after the other, as trainers call them."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 -- the method of an object
        )

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

    def close(self) -> None:
        """Does nothing: there are no resources between calls."""


def _copied(value: Any) -> Any:
    """Copy lists and dicts, which belong to the data, so that a function cannot change later calls."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


class RewardProcess:
    """A function named `file.py:function` or `module:function`, in a process of its own (`worker.py`).

    The process starts at the first call and again after it was ended. It ends at `close`, at any end of the run's
    process, and after a call that timed out, ended the process or sent an unexpected reply. A call that fails in a
    process that answered before is repeated once in a new one, because an earlier call may be the cause. A call that
    timed out is not repeated.

    Output of the function is printed to stderr.
    """

    concurrent = True

    def __init__(self, function: str, load_seconds: float = LOAD_LEAST_SECONDS) -> None:
        """The function is loaded at the first call. `load_seconds`: deadline of importing its file, at least 10."""
        self.function = function
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

    def _ask(self, request: dict[str, Any], seconds: float, read: Callable[[dict[str, Any]], T]) -> T:
        answered_before = self._worker is not None
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
            self._worker = _Worker()
            path = [os.getcwd(), *sys.path]
            try:
                loaded = self._exchange({"load": self.function, "path": path}, self.load_seconds)
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
            line = json.dumps(request | {"id": number}).encode() + b"\n"
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


class _Worker:
    """A started process: supervisor and worker, with the pipes to them."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        # Run by its path and with -P, so that neither the package nor this folder is imported by accident. In its own
        # session it does not receive the terminal's Ctrl-C.
        self.supervisor = subprocess.Popen(
            [sys.executable, "-P", worker.__file__, str(requests), str(replies)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=(requests, replies),
            start_new_session=True,
            # With the same hashes in every process, a function that iterates over a set gives the same results again.
            env=os.environ | {worker.MARK: self.mark, "PYTHONHASHSEED": "0"},
        )
        os.close(requests)
        os.close(replies)
        os.set_blocking(self.requests, False)
        assert self.supervisor.stdout is not None
        self.output = _Output(self.supervisor.stdout.fileno())

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

    def end(self) -> None:
        """End the supervisor, which first ends its descendants; if it was killed itself, find them by their mark."""
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()
        self.supervisor.send_signal(signal.SIGCONT)  # the function may have stopped it
        if sys.platform.startswith("linux"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.supervisor.wait(2 * worker.END_SECONDS)
        if self.supervisor.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.wait()
        if self.supervisor.returncode < 0:
            worker.end_marked(self.mark)
        self.output.drain()
        assert self.supervisor.stdout is not None
        self.supervisor.stdout.close()
        os.close(self.requests)
        os.close(self.replies)

    def last_words(self) -> str:
        """Description of the exit status after `end`; the supervisor exits with the worker's."""
        code = self.supervisor.returncode
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        if code == worker.BROKEN:
            return "its process cannot reply any more: a function must not close files that it did not open"
        return f"its process ended by itself with exit code {code}"


class _Output:
    """Copies the function's output to stderr, without control characters and at most `left` bytes."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.left = descriptor, MOST_OUTPUT_CHARACTERS
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(descriptor, False)

    def pass_on(self) -> bool:
        """Print the available output; False at its end."""
        try:
            read = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not self.left:
            return bool(read)
        text = printable(self._decoder.decode(read).replace("\r\n", "\n"))
        rest = len(text) - self.left
        self.left = max(-rest, 0)
        text = text if rest < 0 else text[: len(text) - rest] + "\n(further output of the function is left out)\n"
        with contextlib.suppress(OSError, ValueError):  # the reader of stderr may be gone
            sys.stderr.write(text)
            sys.stderr.flush()
        return bool(read)

    def drain(self) -> None:
        """Print the remaining output."""
        while self.pass_on():
            pass
