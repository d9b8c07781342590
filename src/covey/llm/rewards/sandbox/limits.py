"""Limits of a sandboxed program."""

from __future__ import annotations

from dataclasses import dataclass

MOST_FILE_BYTES = 1 << 24  # RLIMIT_FSIZE, for a backend in which a program can write at all
MOST_OPEN_FILES = 64
NOBODY = 65534  # user and group id inside a user namespace


@dataclass(frozen=True)
class Limits:
    """What one program may use. The processor and memory limits hold for each of its processes."""

    seconds: float = 5.0  # wall time of one case
    cpu_seconds: int = 6  # processor time of a process
    memory_mb: int = 256  # address space of a process
    processes: int = 4  # processes and threads together, the first included
    output_bytes: int = 1 << 20  # printed to each of stdout and stderr, and of one reply
    start_seconds: float = 60.0  # for the sandbox to report that it is ready, on a busy machine
