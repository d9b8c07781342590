"""Processes of multiprocessing that import no module of the working folder.

multiprocessing starts Python with `-c`, which looks for modules in the working folder first, unless this process does
not (`-P`) or the environment forbids it. A stranger's folder may have a `random.py`. Processes that covey starts itself
have `-P`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

SAFE_PATH, HERE = "PYTHONSAFEPATH", "covey"  # Python's variable, and a value that says who has set it


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Context manager with a variable of the environment, unless it is there already."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def safe_path() -> AbstractContextManager[None]:
    """Context manager in which processes of multiprocessing, its servers included, are started safely."""
    return variable(SAFE_PATH, HERE)


def leave_safe_path() -> None:
    """Let the scripts that a process starts find the modules beside them again: the user's code may start some."""
    if os.environ.get(SAFE_PATH) == HERE:
        del os.environ[SAFE_PATH]
