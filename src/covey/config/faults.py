"""Faults of the machine: a full disk, a missing permission, too little memory. Each becomes one line."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from covey.config.common import ConfigError, MachineError

_ADVICE = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "make the file system writable or move the folder to another disk",
    errno.EIO: "the disk has a defect, move the folder to another disk",
    errno.EACCES: "give yourself permission to it",
    errno.EPERM: "give yourself permission to it",
    errno.ENOENT: "the file or its folder was deleted, put it back",
    errno.ENOTDIR: "a file has taken the place of a folder, put the folder back",
    errno.EISDIR: "a folder has taken the place of a file, remove it",
    errno.EEXIST: "something else has that name, move it away",
    errno.ELOOP: "a link there leads to itself, remove it",
    errno.ESTALE: "the network file system lost it, mount it again",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs, the system has too many open files",
}
# Error codes of an unusable path, a mistake of the user's. Every other code is a fault of the machine.
_MISTAKES = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO,
}  # fmt: skip
_LESS_MEMORY = "close other programs, or make the run smaller (covey plan shows what takes memory)"
# Messages of torch, oneDNN and C++ for a failed allocation, of Python for a thread without a stack, of the linker.
_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|bad_alloc|could not create a memory|out of memory|Cannot allocate memory"
    r"|can't start new thread|failed to map segment",
    re.IGNORECASE,
)
# Forms in which libraries written in Rust, such as safetensors, and torch, when it opens their files, print an errno.
_NAMED_CODE = re.compile(r"\(os error (\d+)\)|unable to \w+ .*file.*: .* \((\d+)\)")


def machine_error(error: BaseException, path: str | Path = "") -> MachineError | None:
    """Convert `error` to a MachineError of one line; None if it is not a fault of the machine.

    Args:
        path: the file that was read or written, if the error itself does not name it.
    """
    if isinstance(error, MachineError):
        return error
    if isinstance(error, (BrokenPipeError, ConnectionError, TimeoutError)):  # another program's or the network's
        return None
    text = " ".join(str(error).split())
    code = _code(error)
    if isinstance(error, MemoryError) or code == errno.ENOMEM or (code is None and _lacks_memory(error, text)):
        return MachineError(f"there is not enough memory ({_shortened(text) or 'MemoryError'}): {_LESS_MEMORY}")
    if code is None:
        return None
    name = getattr(error, "filename", None) or path
    where = f"cannot use {os.fsdecode(name)}" if name else "a file cannot be used"
    return MachineError(f"{where} ({os.strerror(code)}): {_ADVICE.get(code, 'mend that')}")


@contextmanager
def faults_of(path: str | Path) -> Iterator[None]:
    """Context manager that turns a fault of the machine at `path` into a MachineError that names it.

    Raises:
        MachineError: for a fault of the machine. Other exceptions pass.
    """
    try:
        yield
    except Exception as error:
        fault = machine_error(error, path)
        if fault is None or fault is error:
            raise
        raise fault from error


def path_error(error: Exception, what: str, path: str | Path = "") -> ConfigError | MachineError:
    """The exception to raise for a path that the user named: MachineError or, for a mistake of the user's, ConfigError.

    Args:
        what: beginning of the ConfigError's message, such as "cannot read data.jsonl".
        path: the file that was read or written, if the error itself does not name it.
    """
    fault = None if _code(error) in _MISTAKES else machine_error(error, path)
    reason = (str(getattr(error, "strerror", "") or error).strip() or type(error).__name__).splitlines()[0]
    return fault or ConfigError(f"{what}: {reason}")


def _code(error: BaseException) -> int | None:
    """The errno of an error, which may be in its text only if a library written in Rust raised it."""
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT  # safetensors raises it without a number, also for a missing permission
    if isinstance(error, OSError):
        return error.errno
    found = _NAMED_CODE.search(str(error)) if isinstance(error, Exception) else None
    return int(found[1] or found[2]) if found else None


def _lacks_memory(error: BaseException, text: str) -> bool:
    return isinstance(error, (RuntimeError, ImportError)) and bool(_NO_MEMORY.search(text))


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else text[:120] + "..."
