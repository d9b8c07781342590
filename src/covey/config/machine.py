"""Number of processors and memory of the machine, without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def processors() -> int:
    """Number of processors that this process may use; taskset and containers may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory of this machine, or the container's limit; None if it is unknown."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else ""
    except (ValueError, OSError, AttributeError):
        return None
    return min(machine, int(limit)) if limit.isdecimal() else machine
