"""The processes that start and supervise programs in sandlock; `sandlock_launcher.py` starts the first by its path.

    python sandlock_process.py WORKER_FILE REQUESTS

The launcher imports the package, which takes longer than everything else, then forks a supervisor for each request. It
runs nothing else, so a supervisor begins in the same state every time. A request is the settings of one program (JSON)
with four descriptors: its stdin, stdout and stderr, and a socket to the run. Over this socket the supervisor sends its
process id (4 bytes) and, at the end of the program, the exit code (1 byte). It ends the program and all of its
descendants if the program ends or the run closes its end of the socket.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
from types import ModuleType
from typing import Any, NoReturn

MOST_REQUEST_BYTES = 1 << 20


def main() -> NoReturn:
    """Fork a supervisor for each request, until the run ends."""
    processes = _load(sys.argv[1])
    requests = socket.socket(fileno=int(sys.argv[2]))
    with contextlib.suppress(Exception):  # a supervisor tries it again and reports the reason
        import sandlock  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    while True:
        # The descriptors close themselves in a program that is started.
        settings, descriptors, _, _ = socket.recv_fds(requests, MOST_REQUEST_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        if not settings:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            _supervise(processes, json.loads(settings), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _supervise(processes: ModuleType, settings: dict[str, Any], *descriptors: int) -> NoReturn:
    """Run the command of the settings with their policy."""
    *streams, run = descriptors
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        processes.adopt_orphans()
        os.write(run, os.getpid().to_bytes(4, "big"))
        code = _run(processes, settings, run)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 1
    _end(processes, run, code)


def _run(processes: ModuleType, settings: dict[str, Any], run: int) -> int:
    """Run the program; returns its exit code."""
    import sandlock

    processes.limit_resources(**settings["limits"])  # the program inherits them and cannot change them
    program = sandlock.Sandbox(**settings["policy"]).popen(settings["command"])

    def await_the_run() -> None:
        while os.read(run, 1):
            pass
        _end(processes, run, 1)

    threading.Thread(target=await_the_run, daemon=True).start()
    result: Any = program.wait()
    if result.exit_code >= 0:
        return int(result.exit_code) & 0xFF
    return 128 + (result.signal if result.signal and result.signal > 0 else signal.SIGKILL)


def _end(processes: ModuleType, run: int, code: int) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    processes.end_descendants()
    with contextlib.suppress(OSError):  # the run has gone
        os.write(run, bytes([code]))
    os._exit(code)


def _load(path: str) -> ModuleType:
    """The module of the reward worker, which finds and ends descendants."""
    spec = importlib.util.spec_from_file_location("covey_processes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
