"""Ends what is left of sandboxes after the run's process ended; `start_watchdog` starts it by its path.

    python watchdog.py MARK

Sandboxes end with the run by themselves (`--die-with-parent`, a lifeline). This covers the moment in which one is being
started: bwrap asks the kernel for that only after it has started. The watchdog waits for the end of its stdin, which is
the end of the run, then kills every process whose command line has the mark. It needs the standard library alone.
"""

import contextlib
import os
import signal
import sys
import time

SECONDS = 5.0  # for processes that are being started to appear


def main() -> None:
    """Wait for the end of stdin, then kill marked processes until two searches find none."""
    mark = sys.argv[1].encode()
    while os.read(0, 1):
        pass
    deadline, absent = time.monotonic() + SECONDS, 0
    while absent < 2 and time.monotonic() < deadline:
        found = marked_processes(mark)
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        absent = 0 if found else absent + 1
        time.sleep(0.02)


def marked_processes(mark: bytes) -> list[int]:
    """Processes, except this one, whose command line has the mark."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if mark in file.read():
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main()
