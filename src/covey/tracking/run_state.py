"""The state of a run, and the runs below a folder, without opening a run folder for writing and without a lock.

A lock that a reader held for a moment would make a run that starts in this moment fail. So the writer's lock is looked
up where the system lists it, which cannot disturb the writer:

1. `/proc/locks` lists the locks of this machine;
2. `/proc/<pid>/fd` shows if the process that the lock file names has the file open for writing, on a file system whose
   locks are not listed. A process that has the same number later does not;
3. a query (F_OFD_GETLK) asks a network file system, where another machine may hold the lock.

If another machine (or container) wrote the lock file and no lock is visible, an unfinished run counts as running while
its files change.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from covey.config.files import read_end
from covey.config.model_sources import CHECKPOINT_NAME, CHECKPOINTS_FOLDER, CONFIG_FILE, MANIFEST_FILE
from covey.tracking.run_folder import LOCK_FILE, LOG_FILE, METRICS_FILE, ORIGIN_FILE, ROLLOUTS_FOLDER
from covey.tracking.run_store import STOPPED_FILE, SUMMARY_FILE

DEEPEST_FOLDER = 4  # levels of folders below the root of `find_runs`
RECENT_SECONDS = 900.0  # a run of another machine is running if it wrote a file since then
_LAST_BYTES = 1 << 16  # read from the end of a metrics file: usually more than its last line
_LONGEST_LINE = 1 << 22  # read if the last line is longer
_SKIPPED = {"node_modules", "site-packages", "__pycache__"}  # large folders that hold no runs
_FLOCK = "hhqqi4x"  # struct flock of Linux with 64 bits


class RunState(StrEnum):
    """The state of a run; equal to its text."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # before its end, on request; it can be resumed
    CRASHED = "crashed"  # killed, or ended by an error; it can be resumed from its last checkpoint


def run_state(run_dir: str | Path) -> RunState:
    """The state of the run in a folder, by its lock and its files. Nothing is created, changed or locked.

    Older versions write no `stopped.json`: a run without one is stopped if it has a checkpoint of its last step.
    """
    folder = Path(run_dir)
    lock = _Lock.read(folder)
    if lock.is_held():  # before the files are looked at: they are complete if the lock is free
        return RunState.RUNNING
    if os.path.isfile(folder / SUMMARY_FILE):
        return RunState.FINISHED
    if os.path.isfile(folder / STOPPED_FILE):
        return RunState.STOPPED
    if lock.is_foreign and time.time() - last_change(folder) < RECENT_SECONDS:
        return RunState.RUNNING
    step = last_step(folder)
    return RunState.STOPPED if step and step in checkpoint_steps(folder) else RunState.CRASHED


def find_runs(root: str | Path) -> list[Path]:
    """The run folders below `root`, sorted by name; `root` itself if it is one.

    Run folders and hidden folders are not searched. A link to a run folder counts, but links to other folders are not
    followed, and a folder that cannot be read is skipped.
    """
    found = _runs_below(Path(root), DEEPEST_FOLDER)
    seen: set[tuple[int, int]] = set()
    runs = []
    for folder in sorted(found, key=lambda path: (path.is_symlink(), str(path))):
        with suppress(OSError):
            status = folder.stat()
            if (status.st_dev, status.st_ino) not in seen:  # else a link to another one
                seen.add((status.st_dev, status.st_ino))
                runs.append(folder)
    return sorted(runs)


def is_run(folder: Path) -> bool:
    """True if a run began in the folder, even if it has no step yet."""
    try:
        entries = set(os.listdir(folder))
    except OSError:
        return False
    began = bool({CONFIG_FILE, ORIGIN_FILE} & entries)
    return began and bool({METRICS_FILE, LOCK_FILE} & entries)


def last_step(run_dir: Path) -> int:
    """The step of the last undamaged line of the metrics file; 0 before the first. Only the file's end is read."""
    for size in (_LAST_BYTES, _LONGEST_LINE):
        try:
            content, is_whole = read_end(run_dir, METRICS_FILE, most=size)
        except OSError:
            return 0
        lines = content.splitlines()
        for line in reversed(lines if is_whole else lines[1:]):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                step = json.loads(line)["step"]
                if type(step) is int and step > 0:
                    return step
        if is_whole:
            break
    return 0


def last_change(run_dir: Path) -> float:
    """The time when a file of the run was last written, in seconds since the epoch; 0 if there is none."""
    newest = 0.0
    for name in (METRICS_FILE, ROLLOUTS_FOLDER, CHECKPOINTS_FOLDER, SUMMARY_FILE, STOPPED_FILE, LOG_FILE, CONFIG_FILE):
        with suppress(OSError):
            newest = max(newest, (run_dir / name).stat().st_mtime)
    return newest


def checkpoint_steps(run_dir: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending."""
    folder = run_dir / CHECKPOINTS_FOLDER
    try:
        paths = [path for path in folder.iterdir() if os.path.isdir(path) and not path.is_symlink()]
    except OSError:
        return []
    named = [(int(match[1]), path) for path in paths if (match := CHECKPOINT_NAME.fullmatch(path.name))]
    return sorted(step for step, path in named if os.path.isfile(path / MANIFEST_FILE))


def _runs_below(folder: Path, levels: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        paths = list(folder.iterdir()) if levels else []
    except OSError:
        return
    for path in paths:
        if path.name.startswith(".") or path.name in _SKIPPED or not os.path.isdir(path):
            continue
        yield from _runs_below(path, 0 if path.is_symlink() else levels - 1)


@dataclass(frozen=True)
class _Lock:
    """The lock file of a run as a reader sees it."""

    path: Path
    pid: int = 0  # of the process that holds the lock or held it last; 0: the file names none
    host: str = ""  # the machine of that process

    @classmethod
    def read(cls, run_dir: Path) -> _Lock:
        path = run_dir / LOCK_FILE
        with suppress(OSError), _opened(path) as descriptor:
            pid, _, host = os.pread(descriptor, 200, 0).decode(errors="replace").strip().partition(" ")
            if pid.isdecimal() and len(pid) < 20:
                return cls(path, int(pid), host)
        return cls(path)

    @property
    def is_foreign(self) -> bool:
        """True if a process of another machine wrote the file."""
        return self.pid > 0 and self.host != os.uname().nodename

    def is_held(self) -> bool:
        """True if a process holds the lock. The module's docstring says how this is found out."""
        try:
            with _opened(self.path) as descriptor:
                status = os.fstat(descriptor)
                if _is_listed(status, self.pid) or _is_held_remotely(descriptor):
                    return True
        except OSError:
            return False
        return self.pid > 0 and not self.is_foreign and _has_open(self.pid, status)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Context manager: the descriptor of a plain file, for reading; no link is followed.

    Raises:
        OSError: if it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no plain file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _is_listed(status: os.stat_result, pid: int) -> bool:
    """True if `/proc/locks` has an exclusive lock (flock) on the file.

    Some file systems (btrfs, overlays) list another device number than `stat` returns; there the process must agree.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in lines:
        fields = line.split()  # 1: FLOCK ADVISORY WRITE 11545 fe:00:2146739 0 EOF; one that waits has a "->"
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[3] != "WRITE":
            continue
        where, _, inode = fields[5].rpartition(":")
        if inode == str(status.st_ino) and (where == device or fields[4] == str(pid)):
            return True
    return False


def _has_open(pid: int, status: os.stat_result) -> bool:
    """True if a process has the file open for writing."""
    with suppress(OSError):  # it has ended, or is another user's
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed
                if path.lstat().st_mode & stat.S_IWUSR and os.path.samestat(path.stat(), status):
                    return True
    return False


def _is_held_remotely(descriptor: int) -> bool:
    """Ask the file system if another process holds a lock of POSIX; a network file system has flock as such a lock."""
    try:
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    except (OSError, AttributeError):  # no locks there, or another system
        return False
