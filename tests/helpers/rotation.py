"""What CI leaves out: a share of the slow tests and of the mutants by date, and suites whose files have not changed.

`python rotation.py PATH ...` exits with 0 if a file at or below one of the paths has changed. `ROTATION=20785` repeats
the choice of that day, which the tests print.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
DAY = int(os.environ.setdefault("ROTATION", str(int(time.time() // 86400))))  # the processes of one run choose alike
LEFT_OUT: list[str] = []  # what this run of pytest leaves out; `conftest.py` prints it
RECENT_SECONDS = 12 * 3600  # before the last commit: the work that is checked, with a try before it

T = TypeVar("T")


def share(items: Sequence[T], parts: int) -> Sequence[T]:
    """One of `parts` equal shares of the items, another each day."""
    return items[DAY % parts :: parts]


def at_most(items: Sequence[T], count: int) -> Sequence[T]:
    """All items, or a share of them with about `count`."""
    return share(items, max(1, -(-len(items) // count)))


def changed_files() -> set[str]:
    """Files that differ from the last commit, and those of recent commits, below the root; none outside a checkout."""
    last = _git("log", "-1", "--format=%ct")
    recent = f"--since=@{int(last[0]) - RECENT_SECONDS}" if last else "-0"
    committed = _git("log", recent, "--name-only", "--format=")
    return {*committed, *_git("status", "--porcelain", "--no-renames", cut=3)} - {""}


def _git(*arguments: str, cut: int = 0) -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    return [line[cut:] for line in done.stdout.splitlines()]


if __name__ == "__main__":
    sys.exit(not any(name == path or name.startswith(f"{path}/") for name in changed_files() for path in sys.argv[1:]))
