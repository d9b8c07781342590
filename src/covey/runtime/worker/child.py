"""The process in which a user's code runs; `Child` in `process.py` starts it.

A process that hangs can be killed, a thread cannot, so only a process enforces a deadline. There are two processes:

    the run  <-- requests and replies, one line of JSON each -->  the worker, which calls the user's code
       \\__ its standard input, which ends with the run _________  the supervisor, the parent of the worker

The supervisor never runs the user's code. It ends the worker and all processes that the code started if the run
requests it, if the run's process ends in any way, and if the worker ends. On Linux it finds these processes in any
session, because orphans become its children (PR_SET_CHILD_SUBREAPER); elsewhere it ends its process group.

The code is trusted: the processes enforce the deadline and contain crashes. They are not a sandbox.

What the worker does is defined by a service, a module with a function `begin`. It gets the first request and returns
the reply to it, and a function that answers the other requests. If the first request has `sessions`, the worker forks
for each session instead, and the function makes from a seed or settings what answers the requests of one.

This file imports the standard library only and is run by its path, so that the worker starts in milliseconds and
neither the package nor its folder is on the search path of the user's code.
"""

import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import locale
import os
import re
import reprlib
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

NAME = "covey.runtime.worker.child"
MOST_REPLY_BYTES = 1 << 26
MARK = "COVEY_WORKER"  # an environment variable of the supervisor and its descendants
BROKEN = 213  # exit code of a worker that can no longer reply
END_SECONDS = 5.0  # for killed processes to disappear
REAP_SECONDS = 0.2  # between looks for ended sessions
LONGEST_MESSAGE = 300  # characters of an exception in a message
_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1  # of Linux's prctl
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

Message = dict[str, Any]
Answer = Callable[[Message], Message]


class InvalidResult(Exception):
    """The user's code returned something unusable, so every further call would fail too."""


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


def main() -> NoReturn:
    """Serve the socket with the number `sys.argv[1]` by the service whose file and name follow."""
    sys.modules[NAME] = sys.modules["__main__"]  # for the service, whose import of it imports no package
    connection = socket.socket(fileno=int(sys.argv[1]))
    adopt_orphans()
    supervisor = os.getpid()
    worker = os.fork()
    if worker:
        connection.detach()  # stays open until the supervisor ends, so that its end is the end of all
        _supervise(worker)
    try:
        end_with_parent()
        if os.getppid() == supervisor:
            _Worker(connection).serve(_module_at(Path(sys.argv[2]), sys.argv[3]).begin)
    except BaseException as error:
        _print_error(error)
    os._exit(BROKEN)


# ---- the worker ----


class _Worker:
    """Answers the requests of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.process, self.connection = os.getpid(), connection
        self.identity = _identity(connection.fileno())

    def serve(self, begin: Callable[[Message], tuple[Message, Callable[[Any], Any]]]) -> NoReturn:
        """Load the user's code with the first request, then answer the others."""
        _prepare_worker()
        lines = self.connection.makefile("rb")
        first = json.loads(lines.readline())
        sys.path[:] = first.get("path") or sys.path
        loaded: list[Callable[[Any], Any]] = []

        def load(request: Message) -> Message:
            reply, function = begin(request)
            loaded.append(function)
            return reply

        self._send(self._answer(load, first) | {"id": first["id"], "last": False})
        if loaded and "sessions" in first:
            self._serve_sessions(loaded[0])
        for line in lines:
            request = json.loads(line)
            state = ProcessState()  # of which the import may have changed a part
            reply = self._answer(loaded[0], request)
            self._send(reply | {"id": request["id"], "last": not state.restore()})
        os._exit(0)

    def converse(self, answer: Answer) -> None:
        """Answer the requests of a session."""
        for line in self.connection.makefile("rb"):
            request = json.loads(line)
            self._send(self._answer(answer, request) | {"id": request["id"], "last": False})

    def _answer(self, answer: Answer, request: Message) -> Message:
        """A reply, or the reason why there is none. A child that the user's code forked ends here without a reply."""
        code = 0
        try:
            reply = answer(request)
        except InvalidResult as error:
            reply = {"wrong": str(error)}
        except SystemExit as error:  # a failed call, or the end of a forked child
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            reply = {"failed": one_line(error)}
        except BaseException as error:
            reply = {"failed": one_line(error)}
        is_fork = os.getpid() != self.process
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            if is_fork:
                sys.stderr.flush()
        if is_fork:
            os._exit(code & 0xFF)
        return reply

    def _send(self, reply: Message) -> None:
        line = json.dumps(reply).encode() + b"\n"
        if len(line) > MOST_REPLY_BYTES:
            wrong = f"logged more than fits into a reply of {MOST_REPLY_BYTES >> 20} MiB"
            line = json.dumps({"id": reply["id"], "last": False, "wrong": wrong}).encode() + b"\n"
        if _identity(self.connection.fileno()) != self.identity:  # the code closed it and opened another file
            os._exit(BROKEN)
        with contextlib.suppress(ConnectionError):  # the run does not wait any more
            self.connection.sendall(line)

    def _serve_sessions(self, make: Callable[[Any], Answer]) -> NoReturn:
        """Fork for each session, whose socket comes with a line of the connection."""
        gc.freeze()  # so that forks share more memory
        processes: dict[int, int] = {}
        rest, sockets = b"", []
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while True:
            ready = poll.poll(1000 * REAP_SECONDS)
            _reap(processes)
            if not ready:
                continue
            read, found, _, _ = socket.recv_fds(self.connection, 1 << 16, 1)
            if not read:
                os._exit(0)
            sockets += found
            *lines, rest = (rest + read).split(b"\n")
            for request in map(json.loads, lines):
                if "end" in request:
                    _end_group(processes.get(request["end"], 0))
                else:
                    processes[request["new"]] = self._fork(make, request["seed"], sockets.pop(0))

    def _fork(self, make: Callable[[Any], Answer], seed: Any, descriptor: int) -> int:
        process = os.fork()
        if process:
            os.close(descriptor)
            with contextlib.suppress(OSError):  # the fork does the same, whoever is first
                os.setpgid(process, process)
            return process
        try:
            os.setpgid(0, 0)
            end_with_parent()
            self.connection.close()
            _Worker(socket.socket(fileno=descriptor)).converse(make(seed))
            os._exit(0)
        except BaseException as error:
            _print_error(error)
        os._exit(1)


def _reap(processes: dict[int, int]) -> None:
    """End what ended sessions have started in their process group."""
    for number, process in list(processes.items()):
        if _has_ended(process):
            _end_group(process)
            with contextlib.suppress(ChildProcessError):  # without waitid it was waited for already
                os.waitpid(process, 0)
            del processes[number]


def _has_ended(process: int) -> bool:
    """True if a child has ended. Its number stays taken for its group, except on macOS before Python 3.13."""
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return os.waitpid(process, os.WNOHANG)[0] == process


def _end_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process:
            os.killpg(process, signal.SIGKILL)


def _prepare_worker() -> None:
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


def limit_resources(**limits: int) -> None:
    """Set limits by their names in `resource`, such as RLIMIT_AS=1 << 30; a lower hard limit stays.

    Address space is limited on Linux alone: on macOS every process has reserved more than any limit, which is refused.
    """
    for name, limit in limits.items():
        if name == "RLIMIT_AS" and not sys.platform.startswith("linux"):
            continue
        number = getattr(resource, name)
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


# ---- process state ----

TIMER_TOLERANCE_SECONDS = 1.0  # a running timer that differs by less is considered unchanged
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


class ProcessState:
    """Process state that a function may change by accident: working folder, file mode mask, locale, resource limits,
    recursion limit and timers; torch's default type and number of threads if torch is loaded. Limits that a function
    raised are not restored.
    """

    def __init__(self) -> None:
        """Save the present state."""
        self._folder = _working_folder()
        self._mask = _file_mode_mask()
        self._locale = locale.setlocale(locale.LC_ALL)
        self._limits = {number: resource.getrlimit(number) for number in _LIMITS}
        self._recursion = sys.getrecursionlimit()
        self._began = time.monotonic()
        self._timers = {timer: signal.getitimer(timer) for timer in _TIMERS}
        torch = sys.modules.get("torch")
        self._torch = (torch, torch.get_default_dtype(), torch.get_num_threads()) if torch else None

    def restore(self) -> bool:
        """Restore the state. Returns False if a part cannot be restored, such as a lowered hard limit."""
        failed = False
        for step in self._steps():
            try:
                step()
            except (OSError, ValueError, locale.Error):
                failed = True
        return not failed

    def _steps(self) -> Iterator[Callable[[], Any]]:
        """Actions that restore the parts that differ."""
        if sys.getrecursionlimit() < self._recursion:
            yield partial(sys.setrecursionlimit, self._recursion)
        for number, before in self._limits.items():
            if any(map(_is_tighter, resource.getrlimit(number), before)):
                yield partial(resource.setrlimit, number, before)
        for timer, (left, interval) in self._timers.items():
            passed = time.monotonic() - self._began if timer == signal.ITIMER_REAL else 0.0
            left = max(left - passed, 0.0)
            now = signal.getitimer(timer)[0]
            if bool(now) != bool(left) or abs(now - left) > TIMER_TOLERANCE_SECONDS:
                yield partial(signal.setitimer, timer, left, interval)
        if _working_folder() != self._folder:
            yield partial(os.chdir, self._folder)
        if _file_mode_mask() != self._mask:
            yield partial(os.umask, self._mask)
        if locale.setlocale(locale.LC_ALL) != self._locale:
            yield partial(locale.setlocale, locale.LC_ALL, self._locale)
        if self._torch is not None:
            torch, dtype, threads = self._torch
            if torch.get_default_dtype() != dtype:
                yield partial(torch.set_default_dtype, dtype)
            if torch.get_num_threads() != threads:
                yield partial(torch.set_num_threads, threads)


def _is_tighter(limit: int, before: int) -> bool:
    return limit != resource.RLIM_INFINITY and (before == resource.RLIM_INFINITY or limit < before)


def _working_folder() -> str:
    """The current folder; empty if it has been deleted."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def _file_mode_mask() -> int:
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    return mask


# ---- one line for the user ----


def shown(value: Any) -> str:
    """The type of a value and the beginning of its repr, in one printable line, even if its methods raise."""
    if value is None:
        return "None"
    try:
        text = reprlib.repr(value)
    except BaseException:
        text = "(its repr raises)"
    return one_printable_line(f"{type(value).__name__} {text:.60}")


def one_line(error: BaseException) -> str:
    """An exception in one printable line, with the line of the user's function that it passed through."""
    try:
        text = str.__getitem__(str(error), slice(4 * LONGEST_MESSAGE))  # a message may have gigabytes
    except BaseException as another:
        text = f"(its text cannot be shown: str() raised {type(another).__name__})"
    text = one_printable_line(f"{type(error).__name__}: {text}")
    return (text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "...") + user_line(error)


def printable(text: str) -> str:
    """The text without control characters except line ends and tabs."""
    return _CONTROL_CHARACTER.sub(lambda match: ascii(match[0])[1:-1], text)


def one_printable_line(text: str) -> str:
    """The text in one line without control characters."""
    return printable(" ".join(text.split()))


def user_line(error: BaseException) -> str:
    """The first line of the traceback in a file of the user's, else in an installed package, in brackets; "" if all are
    in covey, the import system or asyncio.
    """
    lines = []
    step = error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<frozen")) and f"{os.sep}asyncio{os.sep}" not in name:
            lines.append(("site-packages" in name, f" ({one_printable_line(Path(name).name)} line {step.tb_lineno})"))
        step = step.tb_next
    return min(lines, key=lambda line: line[0], default=(False, ""))[1]


def ending(code: int) -> str:
    """How a process ended that has this exit code, negative for a signal."""
    if code >= 0:
        return f"ended by itself with exit code {code}"
    return f"was killed by {signal.Signals(-code).name if -code in list(signal.Signals) else f'signal {-code}'}"


def _print_error(error: BaseException) -> None:
    with contextlib.suppress(BaseException):
        print(one_line(error), file=sys.stderr, flush=True)


# ---- the supervisor ----


def _supervise(worker: int) -> NoReturn:
    """Wait for the end of the worker or of the run, end all descendants, and exit with the worker's status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # SIGKILL and SIGSTOP remain
    run_ended = threading.Event()
    threading.Thread(target=_await_the_run, args=(worker, run_ended), daemon=True).start()
    while True:
        ended, status = os.waitpid(-1, 0)  # orphans of the user's code are reaped here too
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


def end_descendants(patience: float = 0.0) -> bool:
    """Kill descendants until there are no children: a process may start others until it is killed, and its orphans
    become children of this one. False if there are still some after END_SECONDS.

    Args:
        patience: seconds for children that were killed already, before others are searched.
    """
    began = time.monotonic()
    while time.monotonic() < began + END_SECONDS:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() >= began + patience:
            _kill(_descendants(os.getpid()))
        time.sleep(0.002)
    return False


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
