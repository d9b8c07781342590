"""The process in which a user's reward function runs; `RewardProcess` starts it.

A process that hangs can be killed, a thread cannot, so only a process enforces a deadline. There are two processes:

    the run  <-- requests and replies, one line of JSON each -->  the worker, which calls the function
       \\__ its standard input, which ends with the run _________  the supervisor, the parent of the worker

The supervisor never runs the user's code. It ends the worker and all processes that the function started if the run
requests it, if the run's process ends in any way, and if the worker ends. On Linux it finds these processes in any
session, because orphans become its children (PR_SET_CHILD_SUBREAPER); elsewhere it ends its process group.

The function is trusted: the processes enforce the deadline and contain crashes. They are not a sandbox.

This file and the three that it loads import the standard library only, so that the worker starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

MOST_REPLY_BYTES = 1 << 26  # limit of one reply, with the columns of log_extra
MARK = "COVEY_REWARD_PROCESS"  # an environment variable of the supervisor and its descendants
BROKEN = 213  # exit code of a worker that can no longer reply
END_SECONDS = 5.0  # for killed processes to disappear
_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1  # of Linux's prctl


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the present text of the file. Cached bytecode may be of another text of the same second and length."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _module_at(path: Path, name: str) -> ModuleType:
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    loader.exec_module(module)
    return module


if TYPE_CHECKING or __package__:
    from covey.llm.rewards import adapters, process_state, reward_call
else:  # run by its path, so that neither the package nor this folder is on the function's search path
    reward_call = _module_at(Path(__file__).with_name("reward_call.py"), "covey_reward_call")
    process_state = _module_at(Path(__file__).with_name("process_state.py"), "covey_process_state")
    adapters = _module_at(Path(__file__).with_name("adapters.py"), "covey_adapters")


def main() -> NoReturn:
    """Serve requests from one file descriptor, `sys.argv[1]`, with replies to another, `sys.argv[2]`."""
    requests, replies = int(sys.argv[1]), int(sys.argv[2])
    run_supervised(lambda: _Server(requests, replies).serve())


def run_supervised(serve: Callable[[], NoReturn]) -> NoReturn:
    """Fork: this process becomes the supervisor, the child serves."""
    adopt_orphans()
    supervisor = os.getpid()
    worker = os.fork()
    if worker:
        _supervise(worker)
    try:
        end_with_parent()
        if os.getppid() != supervisor:
            os._exit(BROKEN)
        serve()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(reward_call.one_line(error), file=sys.stderr, flush=True)
    os._exit(BROKEN)


# ---- the worker ----


class _Server:
    """Loads the function that the first request names, then calls it for every further request."""

    def __init__(self, requests: int, replies: int) -> None:
        self.process = os.getpid()
        self.requests, self.replies = os.fdopen(requests, "rb", closefd=False), replies
        self.pipe = _identity(replies)
        self.function: Callable[..., Any] | None = None
        prepare_worker()

    def serve(self) -> NoReturn:
        while line := self.requests.readline():
            request = json.loads(line)
            state = process_state.ProcessState()
            reply = self._answer(request)
            # State that the module changes at its import is kept.
            sound = "load" in request or state.restore()
            self._send({"id": request["id"], "last": not sound, **reply})
        os._exit(0)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Results, or the reason why there are none. A child that the function forked ends here without a reply."""
        code = 0
        try:
            reply = self._call(request)
        except reward_call.InvalidRewardOutput as error:
            reply = {"wrong": str(error)}
        except SystemExit as error:  # a failed call, or the end of a forked child
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            reply = {"failed": reward_call.one_line(error)}
        except BaseException as error:
            reply = {"failed": reward_call.one_line(error)}
        if os.getpid() != self.process:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 0xFF)
        return reply

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.function is None:
            sys.path[:] = request["path"]
            self.function = load_function(request["load"])
            if request["memory_mib"]:
                _limit_resources(request["memory_mib"] << 20)
            return {}
        if "text" in request:
            return {"results": reward_call.call_on_text(self.function, request["text"])}
        arguments = request["arguments"]
        function = adapters.adapted(self.function, arguments)
        results = reward_call.call_function(function, arguments, request["global_step"], request["step_counts"])
        return {"results": results.values, "metrics": results.metrics, "extras": results.extras}

    def _send(self, reply: dict[str, Any]) -> None:
        line = json.dumps(reply).encode() + b"\n"
        if len(line) > MOST_REPLY_BYTES:
            wrong = f"logged more than fits into a reply of {MOST_REPLY_BYTES >> 20} MiB"
            line = json.dumps({"id": reply["id"], "last": False, "wrong": wrong}).encode() + b"\n"
        if _identity(self.replies) != self.pipe:  # the function closed it and opened another file with its number
            os._exit(BROKEN)
        view = memoryview(line)
        while view:
            view = view[os.write(self.replies, view) :]


def prepare_worker() -> None:
    """Give the worker an empty standard input, because the supervisor needs its own, and make it end before the run."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel ends this process and not the run


def end_with_parent() -> None:
    """End this process if its parent ends, on Linux."""
    _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _limit_resources(address_space: int) -> None:
    """Limit the address space in bytes, and forbid to write files and core dumps."""
    for number, limit in ((resource.RLIMIT_AS, address_space), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(number)[1]
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (most, most))


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def load_function(name: str) -> Callable[..., Any]:
    """Import the function named `file.py:function` or `module:function`.

    Raises:
        AttributeError: if the module has no such function. Exception: any that importing the module raises.
    """
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        sys.dont_write_bytecode = True  # no __pycache__ beside the user's files
        module = _module_at(path, f"reward_file_{path.stem}")
    else:
        module = importlib.import_module(source)
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        if function is not None:
            raise AttributeError(f"{attribute!r} in {source} is an object: name a function or a class")
        raise AttributeError(f"{source} has no function {attribute!r}")
    defined = getattr(getattr(function, "func", function), "__module__", None) or ""  # `func` of functools.partial
    if defined.partition(".")[0] in sys.stdlib_module_names:
        raise AttributeError(f"{attribute!r} in {source} is of Python's module {defined}: name your own function")
    return function


# ---- the supervisor ----


def _supervise(worker: int) -> NoReturn:
    """Wait for the end of the worker or of the run, end all descendants, and exit with the worker's status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # SIGKILL and SIGSTOP remain
    run_ended = threading.Event()
    threading.Thread(target=_await_the_run, args=(worker, run_ended), daemon=True).start()
    while True:
        ended, status = os.waitpid(-1, 0)  # orphans of the function are reaped here too
        if ended == worker:
            break
    end_descendants()
    code = 0 if run_ended.is_set() else os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _await_the_run(worker: int, run_ended: threading.Event) -> None:
    """Wait for the end of standard input, whose other end the run closes, also if it is killed."""
    while os.read(0, 1):
        pass
    run_ended.set()
    if not sys.platform.startswith("linux"):
        os.killpg(0, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphans among the descendants children of this process, so that `end_descendants` finds them."""
    _prctl(_SUBREAPER, 1)


def end_descendants() -> None:
    """Kill descendants until there are no children: a process may start others until it is killed, and its orphans
    become children of this one.
    """
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        _kill(_descendants(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def end_marked(mark: str) -> None:
    """Kill the processes whose environment has the mark, if the supervisor itself was killed."""
    deadline = time.monotonic() + END_SECONDS
    absent = 0
    while absent < 2 and time.monotonic() < deadline:  # a single scan may miss a process that starts another and ends
        found = marked_processes(mark)
        _kill(found)
        absent = 0 if found else absent + 1
        time.sleep(0.002)


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def marked_processes(mark: str) -> list[int]:
    """Processes whose environment has the mark; empty without /proc."""
    wanted = f"{MARK}={mark}".encode()
    return [process for process in _processes() if wanted in _read(process, "environ").split(b"\0")]


def _descendants(ancestor: int) -> list[int]:
    """Processes below `ancestor` that have not ended yet."""
    children: dict[int, list[int]] = {}
    for process in _processes():
        state, _, rest = _read(process, "stat").rpartition(b")")[2].strip().partition(b" ")
        if state and state not in b"ZX":
            children.setdefault(int(rest.split()[0]), []).append(process)
    found, waiting = [], [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _read(process: int, name: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{process}/{name}", "rb") as file:
        return file.read()
    return b""


def _prctl(option: int, value: int) -> None:
    """Call Linux's prctl; no effect on other systems."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
