"""Calls a reward function of the user's own, in a child process that can be killed when it takes too long.

A thread that hangs cannot be stopped, a process can, so only a process gives a real deadline. Both ends of the pipe
are here: `RewardProcess` in the run, `main` in the child. A request is one line of JSON, so is its reply.

The function is trusted: the child is there for the deadline and for crashes. It is not a sandbox.

This file imports the standard library only, so that the child starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import IO, Any

LOAD_SECONDS = 60.0  # to import the file with the function; it may import torch
ORPHAN_GRACE_SECONDS = 5.0  # after its deadline a child ends by itself, should nobody be there to kill it


class CallFailed(Exception):
    """The call gave no rewards: the function raised, or its process ended."""


class TookTooLong(CallFailed):
    """The call was still running at its deadline."""


class WrongResults(Exception):
    """The call gave something other than was asked for: one number or None per completion, as a rule."""


# ---- calling the function, in whichever process ----


def call_function(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    global_step: int,
    step_counts: Sequence[int] | None = None,
) -> list[Any]:
    """Call with TRL's signature; a coroutine is awaited. Returns one float or None per completion.

    With `step_counts`, the number of reasoning steps of every completion, it returns one list or None per completion,
    with one float for each step.

    A function without `**kwargs` gets only the arguments that it names. One that names them also gets `trainer_state`
    (its `global_step` is the number of updates behind the weights that wrote the completions) and `log_metric` and
    `log_extra`, which do nothing here.

    Raises:
        WrongResults: for the wrong count, or something that is no number.
        TypeError: if the function needs an argument that is no column of the data.
        Exception: whatever the function raises.
    """
    results = function(**_accepted(function, arguments, global_step))
    if inspect.isawaitable(results):
        import asyncio  # slow to import, and rarely needed

        async def wait() -> Any:
            return await results

        results = asyncio.run(wait())
    values = _checked(results, len(arguments["completions"]), "numbers" if step_counts is None else "lists")
    if step_counts is None:
        return [_number(value) for value in values]
    return [_step_numbers(value, count) for value, count in zip(values, step_counts, strict=True)]


def call_on_text(function: Callable[..., Any], text: str) -> list[int]:
    """The positions that a boundary function gives for one text.

    Raises:
        WrongResults: for something that is no list of whole numbers.
        Exception: whatever the function raises.
    """
    results = function(text)
    if isinstance(results, (str, bytes, Mapping)) or not hasattr(results, "__iter__"):
        raise WrongResults(f"returned {_shown(results)} instead of a list of positions in the text")
    positions = list(results)
    for position in positions:
        if not hasattr(position, "__index__"):  # NumPy's whole numbers have it too
            raise WrongResults(f"returned {_shown(position)} where a position in the text, a whole number, is needed")
    return [int(position) for position in positions]


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any], global_step: int) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    extras = {
        "trainer_state": SimpleNamespace(global_step=global_step),
        "log_metric": _ignore,
        "log_extra": _ignore,
    }
    named = {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = {name: value for name, value in arguments.items() if takes_all or name in named}
    accepted |= {name: value for name, value in extras.items() if name in named}
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if required and parameter.name not in accepted:
            raise TypeError(f"it asks for {parameter.name!r}, but the data has only {', '.join(arguments)}")
    return accepted


def _ignore(*_: Any, **__: Any) -> None:
    """Stands for TRL's log_metric and log_extra."""


def _checked(results: Any, count: int, what: str) -> list[Any]:
    if isinstance(results, (str, bytes, Mapping)) or not hasattr(results, "__iter__"):
        raise WrongResults(f"returned {_shown(results)} instead of a list of {count} {what}")
    values = list(results)
    if len(values) != count:
        raise WrongResults(f"returned {len(values)} results for {count} completions")
    return values


def _step_numbers(value: Any, count: int) -> list[float] | None:
    """What a step reward says of one completion of `count` steps."""
    if value is None:
        return None
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise WrongResults(
            f"returned {_shown(value)} for a completion of {count} steps: with per_step = true a list is needed, one "
            "number for each of its `steps`"
        )
    numbers = [_number(item) for item in value]
    if len(numbers) != count:
        raise WrongResults(
            f"returned {len(numbers)} numbers for a completion of {count} steps: give one for each item of `steps`"
        )
    if None in numbers:
        raise WrongResults("returned None for a step: give every step a number, or None in place of the whole list")
    return numbers  # type: ignore[return-value]


def _number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError):
        pass
    fix = "; for one number for each reasoning step set per_step = true" if isinstance(value, (list, tuple)) else ""
    raise WrongResults(f"returned {_shown(value)} where a number or None is needed{fix}")


def _shown(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def one_line(error: BaseException) -> str:
    """An exception in one line, with the line of the user's function that it passed through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    where = f" ({Path(frames[0].filename).name} line {frames[0].lineno})" if frames else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return (text if len(text) <= 300 else text[:300] + "...") + where


# ---- the run's end ----


class RewardProcess:
    """A function named `file.py:function` or `module:function`, in a child process of its own.

    The child starts with the first call and again after one that failed. What the function prints goes to stderr. The
    child ends with `close`, and when the run's own process ends, however that happens.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        self._process: subprocess.Popen[bytes] | None = None

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> list[Any]:
        """One call of a reward function, within `seconds`; arguments and results are those of `call_function`.

        Raises:
            CallFailed: if the function raised or its process ended. TookTooLong: at the deadline.
            WrongResults: if it returned something else.
        """
        counts = None if step_counts is None else list(step_counts)
        return self._ask({"arguments": arguments, "global_step": global_step, "step_counts": counts}, seconds)

    def call_on_text(self, text: str, seconds: float) -> list[int]:
        """One call of a boundary function, within `seconds`. Errors as in `call`."""
        return self._ask({"text": text}, seconds)

    def _ask(self, request: dict[str, Any], seconds: float) -> list[Any]:
        if self._process is None:
            self._start()
        reply = self._exchange(request | {"seconds": seconds}, seconds)
        if "wrong" in reply:
            raise WrongResults(reply["wrong"])
        if "failed" in reply:
            raise CallFailed(reply["failed"])
        results: list[Any] = reply["results"]
        return results

    def close(self) -> None:
        """Kill the child and whatever it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> None:
        # Run by its path and with -P, so that neither the package nor this folder is imported by accident. A session
        # of its own keeps the terminal's Ctrl-C from it and lets `close` reach its children.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        request = {"load": self.function, "path": [os.getcwd(), *sys.path], "seconds": LOAD_SECONDS}
        reply = self._exchange(request, LOAD_SECONDS)
        if "failed" in reply:
            self.close()
            raise CallFailed(f"cannot be loaded: {reply['failed']}")

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its reply. On any failure the child is killed: it may reply later, to nobody."""
        assert self._process is not None
        try:
            line = json.dumps(request).encode() + b"\n"
            reply: dict[str, Any] = json.loads(_write_and_read(self._process, line, seconds))
            return reply
        except BaseException as error:
            words = _last_words(self._process) if isinstance(error, (BrokenPipeError, EOFError)) else ""
            self.close()
            if words:
                raise CallFailed(words) from None
            if isinstance(error, TimeoutError):
                raise TookTooLong(f"took longer than {seconds:g} s") from None
            if isinstance(error, (TypeError, ValueError)):
                raise CallFailed(f"its arguments cannot be sent to its process as JSON: {error}") from None
            raise


def _write_and_read(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """Both directions under one deadline, so that a child that does not read cannot block the run either."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    to_write = memoryview(line)
    reply = bytearray()
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while not reply.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    to_write = to_write[os.write(process.stdin.fileno(), to_write) :]
                    if not to_write:
                        selector.unregister(process.stdin)
                else:
                    read = os.read(process.stdout.fileno(), 1 << 16)
                    if not read:
                        raise EOFError
                    reply += read
    return bytes(reply)


def _last_words(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return "its process closed the connection"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended by itself with exit code {code}"


# ---- the child's end ----


def main() -> None:
    """Load the function that the first request names, then call it for every further request."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Whatever the function reads from stdin or prints must not touch the conversation.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_lines, args=(requests, lines), daemon=True).start()
    function: Callable[..., Any] | None = None
    while True:
        request = json.loads(lines.get())
        # The alarm's default action ends the process even while the function sits in C code and holds the GIL.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + ORPHAN_GRACE_SECONDS)
        reply: dict[str, Any]
        try:
            if function is None:
                sys.path[:] = request["path"]
                function, reply = load_function(request["load"]), {}
            elif "text" in request:
                reply = {"results": call_on_text(function, request["text"])}
            else:
                step, counts = request["global_step"], request["step_counts"]
                reply = {"results": call_function(function, request["arguments"], step, counts)}
        except WrongResults as error:
            reply = {"wrong": str(error)}
        except BaseException as error:  # sys.exit in a reward function is a failed call like any other
            reply = {"failed": one_line(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _read_lines(requests: IO[bytes], lines: SimpleQueue[bytes]) -> None:
    """Pass requests on; when the run's process is gone, so is the pipe, and this process ends, busy or not."""
    for line in requests:
        lines.put(line)
    os._exit(0)


def load_function(name: str) -> Callable[..., Any]:
    """The function behind `file.py:function` or `module:function`.

    Raises:
        AttributeError: if the module has no such function. Exception: whatever importing the module raises.
    """
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise AttributeError(f"{source} has no function {attribute!r}")
    return function


if __name__ == "__main__":
    main()
