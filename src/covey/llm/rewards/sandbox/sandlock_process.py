"""The process that supervises one program in sandlock; `sandlock.py` starts it by its path.

    python sandlock_process.py WORKER_FILE LIFELINE SETTINGS

It ends the program and all of its descendants if the program ends or the lifeline's other end is closed, and exits with
the program's status.
"""

import importlib.util
import json
import os
import resource
import signal
import sys
import threading
from types import ModuleType
from typing import Any, NoReturn


def main() -> NoReturn:
    """Run the command of the settings with their policy."""
    processes = _load(sys.argv[1])
    lifeline, settings = int(sys.argv[2]), json.loads(sys.argv[3])
    processes.adopt_orphans()
    import sandlock

    for name, number in settings["limits"].items():  # the program inherits them and cannot change them
        hard = resource.getrlimit(getattr(resource, name))[1]
        number = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(getattr(resource, name), (number, number))
    program = sandlock.Sandbox(**settings["policy"]).popen(settings["command"])

    def await_the_run() -> None:
        while os.read(lifeline, 1):
            pass
        _end(processes, 1)

    threading.Thread(target=await_the_run, daemon=True).start()
    result: Any = program.wait()
    if result.exit_code >= 0:
        _end(processes, result.exit_code & 0xFF)
    _end(processes, 128 + (result.signal if result.signal and result.signal > 0 else signal.SIGKILL))


def _end(processes: ModuleType, code: int) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    processes.end_descendants()
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
