"""The folder of a run: its files, the lock that excludes other writers, its state, and the runs below a folder.

A reader of the state opens nothing for writing. It asks for a shared lock and releases it at once, which every system
and network file system answers alike; a run that starts in this moment tries again. On a file system without locks,
`/proc/<pid>/fd` shows if the process that the lock file names has the file open for writing. A process that has the
same number later does not.

If another machine (or container) wrote the lock file and no lock is visible, an unfinished run counts as running while
its files change.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from covey.config import ConfigError, MachineError
from covey.config.fields import command
from covey.config.files import Refused, faults_of, path_error, read_end, read_toml, sync, user_path
from covey.config.model_sources import (
    ARCHITECTURE_FOLDER,
    CHECKPOINT_NAME,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    MANIFEST_FILE,
)
from covey.config.sft import REWARD_MODEL_ALGORITHM, SFT_ALGORITHM

_log = logging.getLogger(__name__)

LOCK_FILE = "covey.lock"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FOLDER = "rollouts"
HELD_OUT_FOLDER = "held_out"
TRACKERS_FOLDER = "trackers"
ORIGIN_FILE = "origin.json"
SUMMARY_FILE = "summary.json"
STOPPED_FILE = "stopped.json"  # like the summary, of a run that was stopped before its end
CURVE_FILE = "curve.png"
ITERATIONS_FILE = "iterations.jsonl"  # of an iterative run: its trainings of the reward model
EXAMPLES_FILE = "examples.jsonl"  # the samples on which a run of `covey sft` is trained
_DRAFT = ".tmp"  # suffix of a file that is being written
_UNFINISHED = ".unfinished-"  # prefix of folders that a crash may leave behind
RESUMED_BY = {SFT_ALGORITHM: "sft", REWARD_MODEL_ALGORITHM: "reward-model train"}  # algorithm -> command
LOG_FILE = "output.log"  # terminal output of a run of a comparison

DEEPEST_FOLDER = 4  # levels of folders below the root of `find_runs`
RECENT_SECONDS = 900.0  # a run of another machine is running if it wrote a file since then
_LAST_BYTES = 1 << 16  # read from the end of a metrics file: usually more than its last line
_LONGEST_LAST_LINE = 1 << 22  # read if the last line is longer
_SKIPPED = {"node_modules", "site-packages", "__pycache__"}  # large folders that hold no runs
_READER_SECONDS = 2.0  # in which readers of the state must have released their locks

# Files that a run writes before its first step; a folder with no others can be replaced.
_BEFORE_THE_FIRST_STEP = {
    LOCK_FILE, CONFIG_FILE, METRICS_FILE, ROLLOUTS_FOLDER, HELD_OUT_FOLDER, ORIGIN_FILE, CHECKPOINTS_FOLDER,
    ARCHITECTURE_FOLDER, TRACKERS_FOLDER, EXAMPLES_FILE, f"{_UNFINISHED}new", f"{_UNFINISHED}old",
}  # fmt: skip


class FolderLock:
    """An exclusive lock on a folder, for the one process that writes into it.

    An operating-system lock (flock) on the file `covey.lock`, released when the process ends, even by kill -9. Forked
    children and programs that this process starts do not hold it. The file remains and names the last process.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of an existing folder.

        Raises:
            ConfigError: if another process holds it; the message names that process.
            MachineError: if the file cannot be written.
        """
        self.folder = folder
        with faults_of(folder / LOCK_FILE):
            self._descriptor = _open_locked(folder)
        self.release = weakref.finalize(self, _unlock, self._descriptor)
        _held.add(self)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Check that the folder still exists and is the same one.

        Raises:
            MachineError: if it was deleted, moved or replaced.
        """
        if not _is_file_of(self.folder / LOCK_FILE, self._descriptor):
            raise MachineError(
                f"the run folder {self.folder} was deleted or moved while the run wrote to it: put it back"
            )


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close the descriptor in a forked child without unlocking: the parent's lock ends with its last descriptor."""
    for lock in list(_held):
        if lock.release.detach() is not None:
            os.close(lock._descriptor)


os.register_at_fork(after_in_child=_release_in_child)


def _unlock(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a child that was just forked may have a copy
    os.close(descriptor)


def _lock_among_readers(descriptor: int) -> None:
    """Take the lock of a writer, after readers of the state that hold it for a moment.

    Raises:
        BlockingIOError: if another writer holds it. OSError: if the file system has no locks.
    """
    deadline = time.monotonic() + _READER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if _has_writer(descriptor) or time.monotonic() > deadline:
                raise
        time.sleep(0.001)


def _has_writer(descriptor: int) -> bool:
    """True if another descriptor holds the lock of a writer.

    Raises:
        OSError: if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _open_locked(folder: Path) -> int:
    path = folder / LOCK_FILE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise Refused(f"{path} is not a plain file: remove it")
        try:
            _lock_among_readers(descriptor)
        except BlockingIOError:
            holder = _holder(os.pread(descriptor, 200, 0))
            os.close(descriptor)
            raise ConfigError(
                f"{folder} is being written by {holder}: wait until it ends, or use another folder"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(descriptor)
                raise
            _log.warning("the file system of %s has no locks: nothing keeps a second run out of it", folder)
        if _is_file_of(path, descriptor):  # else the file was deleted in between
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
            return descriptor
        os.close(descriptor)


def _holder(content: bytes) -> str:
    """Description of the process that a lock file names."""
    pid, _, host = content.decode(errors="replace").strip().partition(" ")
    if not pid.isdecimal():
        return "another process"
    return f"process {pid}" + ("" if host == os.uname().nodename else f" on {host}")


def _is_file_of(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_run_dir(run_dir: str | Path, *, resume: bool = False) -> Path:
    """Refuse a folder that a run cannot use, without creating anything; returns its path.

    A new run may use a folder that does not exist, an empty one, or one whose run ended before its first step.

    Raises:
        ConfigError: if the folder cannot hold a run, already holds one, is being written by another process, or (with
            `resume`) holds none.
        MachineError: if it cannot be written because of the disk or its permissions.
    """
    with _unusable(run_dir):
        folder = user_path(run_dir, "run_dir: ")
        if resume and not holds_run(folder):
            raise ConfigError(f"there is no run to resume in {run_dir}: {_what_is_missing(folder)}")
        if not resume:
            _refuse_occupied(folder, run_dir)
        if (folder / LOCK_FILE).is_file():
            FolderLock(folder).release()
        _try_to_write(next(path for path in (folder, *folder.absolute().parents) if _is_there(path)))
    return folder


def _try_to_write(folder: Path) -> None:
    """Raise OSError if no file can be created in the folder. Permission bits alone do not show it, as for root."""
    from tempfile import TemporaryFile  # here, because it loads much

    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        error.filename = str(folder)  # the temporary file's name would not help the user
        raise


@contextmanager
def _unusable(run_dir: str | Path) -> Iterator[None]:
    """Context manager that turns an OSError at a run folder into a one-line ConfigError or MachineError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, (ConfigError, MachineError)):
            raise
        raise path_error(error, f"cannot write the run folder {run_dir}, name another with --run-dir") from error


def _refuse_occupied(folder: Path, shown: str | Path) -> None:
    """Refuse a folder with files that a new run would overwrite or mix with its own."""
    if holds_run(folder):
        raise ConfigError(
            f"{shown} already holds a run: continue it with "
            f"{command(*resuming_command(folder).split(), '--resume', shown)}, "
            "or name another folder with --run-dir"
        )
    if not _is_there(folder):
        return
    if not folder.exists():
        raise ConfigError(f"{shown} is a link that leads nowhere: name another folder with --run-dir")
    if folder.is_dir() and folder.resolve() == Path.home().resolve():
        raise ConfigError(f"{shown} is your home folder: name a new folder for the run with --run-dir")
    foreign = _foreign(folder)
    if foreign:
        raise ConfigError(
            f"{shown} is not empty and holds no run of covey (it has {foreign[0]}): name a new folder with --run-dir"
        )


def _is_there(path: Path) -> bool:
    """True if the path exists, also as a broken link."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _what_is_missing(folder: Path) -> str:
    """The reason why a folder has no run to resume."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / CONFIG_FILE).is_file() and not (folder / ORIGIN_FILE).is_file():
        return f"it has neither {CONFIG_FILE} nor {ORIGIN_FILE}, which every run of covey has"
    return "no step is recorded there"


def _foreign(folder: Path) -> list[str]:
    """Entries of a folder other than those of a run that ended before its first step."""
    names = sorted(entry.name for entry in folder.iterdir())
    own = _BEFORE_THE_FIRST_STEP if LOCK_FILE in names else set()
    return [name for name in names if name.removesuffix(_DRAFT) not in own | {LOG_FILE}]


def check_new_file(path: Path, option: str) -> None:
    """Refuse a file that already exists, or whose folder does not; `option` names it in the message.

    Raises:
        ConfigError: for a name that cannot be used.
        MachineError: if the folder cannot be written.
    """
    if _is_there(path):
        raise ConfigError(f"{option} {path}: the file is there already, and is not replaced: name another")
    try:
        _try_to_write(path.absolute().parent)
    except OSError as error:
        raise path_error(error, f"{option} {path}: create the folder {path.parent}, or name another") from None


def holds_run(run_dir: Path) -> bool:
    """True if the folder holds a run that recorded a step or saved anything."""
    if not ((run_dir / CONFIG_FILE).is_file() or (run_dir / ORIGIN_FILE).is_file()):
        return False
    metrics, checkpoints = run_dir / METRICS_FILE, run_dir / CHECKPOINTS_FOLDER
    return (metrics.is_file() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def resuming_command(run_dir: Path) -> str:
    """The command that resumes the run in a folder: "train", "sft" or "reward-model train"."""
    with suppress(ConfigError, MachineError, OSError):
        algorithm = read_toml(run_dir / CONFIG_FILE).get("algorithm")
        return RESUMED_BY.get(algorithm, "train") if isinstance(algorithm, str) else "train"
    return "train"


def next_run_dir(recipe_name: str, root: Path = Path("runs")) -> Path:
    """The folder `<root>/<recipe>-<number>` after the largest existing number: runs/arithmetic_grpo-001."""
    pattern = re.compile(re.escape(recipe_name) + r"-(\d+)")
    matches = (pattern.fullmatch(path.name) for path in (root.iterdir() if root.is_dir() else ()))
    last = max((int(match[1]) for match in matches if match), default=0)
    return root / f"{recipe_name}-{last + 1:03d}"


def claim_run_dir(recipe_name: str, root: Path = Path("runs")) -> Path:
    """Create the folder of `next_run_dir`. Concurrent processes get different folders.

    Raises:
        ConfigError, MachineError: if it cannot be created.
    """
    with _unusable(root):
        root.mkdir(parents=True, exist_ok=True)
        while True:
            folder = next_run_dir(recipe_name, root)
            try:
                folder.mkdir()
            except FileExistsError:  # another process was faster
                continue
            return folder


def open_run_dir(run_dir: str | Path, *, resume: bool = False) -> FolderLock:
    """Create the folder of a run, or with `resume` open it, and lock it.

    Raises:
        ConfigError, MachineError: as `check_run_dir`.
    """
    folder = check_run_dir(run_dir, resume=resume)
    with _unusable(run_dir):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        if not resume:
            _refuse_occupied(folder, run_dir)  # another run may have used it since the check
    except BaseException:
        lock.release()
        raise
    return lock


def write_folders(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write` on a temporary folder, then move its entries into `folder`, replacing each as a whole.

    Raises:
        MachineError: if that fails.
    """
    draft, old = folder / f"{_UNFINISHED}new", folder / f"{_UNFINISHED}old"
    with faults_of(folder):
        for leftover in (draft, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        try:
            draft.mkdir()
            write(draft)
            give_usual_permissions(draft)
            for path in draft.rglob("*"):
                sync(path)
            old.mkdir()
            for part in draft.iterdir():
                if os.path.lexists(folder / part.name):
                    (folder / part.name).rename(old / part.name)
                part.rename(folder / part.name)
            sync(folder)
        finally:
            for leftover in (draft, old):
                shutil.rmtree(leftover, ignore_errors=True)


def give_usual_permissions(folder: Path) -> None:
    """Give the weights below a folder the permissions of the umask, because safetensors saves for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o666 & ~mask)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file atomically: a crash leaves the old content or the new one.

    Raises:
        MachineError: if that fails; the old one is untouched.
    """
    temporary = path.with_name(path.name + _DRAFT)
    with faults_of(path):
        try:
            temporary.unlink(missing_ok=True)  # an interrupted writer's, or a pipe, which would block
            temporary.write_bytes(data)
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def discard_unstarted(folder: Path) -> None:
    """Remove the folder of a run that ended before its first step, if it has no other entries."""
    if holds_run(folder) or not folder.is_dir() or _foreign(folder):
        return
    for path in list(folder.iterdir()):
        if path.name in (LOCK_FILE, LOG_FILE):
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    if set(os.listdir(folder)) == {LOCK_FILE}:
        (folder / LOCK_FILE).unlink()
        folder.rmdir()


class RunState(StrEnum):
    """The state of a run; equal to its text."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # before its end, on request; it can be resumed
    CRASHED = "crashed"  # killed, or ended by an error; it can be resumed from its last checkpoint


def run_state(run_dir: str | Path) -> RunState:
    """The state of the run in a folder, by its lock and its files. Nothing is created or changed.

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
    for size in (_LAST_BYTES, _LONGEST_LAST_LINE):
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
                with suppress(OSError):  # no locks there
                    return _has_writer(descriptor)
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


def _has_open(pid: int, status: os.stat_result) -> bool:
    """True if a process has the file open for writing."""
    with suppress(OSError):  # it has ended, or is another user's
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed
                if path.lstat().st_mode & stat.S_IWUSR and os.path.samestat(path.stat(), status):
                    return True
    return False
