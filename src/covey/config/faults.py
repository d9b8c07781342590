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
# What the system says of a name that leads to nothing usable. Everything else has its cause in the machine.
_MISTAKES = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO,
}  # fmt: skip
_LESS_MEMORY = "close other programs, or make the run smaller (covey plan shows what takes memory)"
# What torch, oneDNN and C++ say if an allocation fails, Python if a thread gets no stack, the linker of a library.
_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|bad_alloc|could not create a memory|out of memory|Cannot allocate memory"
    r"|can't start new thread|failed to map segment",
    re.IGNORECASE,
)
# How libraries written in Rust, such as safetensors, name an errno, and how torch does that opens a file for them.
_NAMED_CODE = re.compile(r"\(os error (\d+)\)|unable to \w+ .*file.*: .* \((\d+)\)")


def machine_error(error: BaseException, path: str | Path = "") -> MachineError | None:
    """`error` as a fault of the machine, in one line; None if it is none.

    Args:
        path: what was read or written, if the error itself does not name it.
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
    """Turn what goes wrong with `path` inside the block into a MachineError that names it.

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


def told(error: Exception, what: str, path: str | Path = "") -> ConfigError | MachineError:
    """The exception to raise for a path that the user named: a fault of the machine, or a mistake in what is there.

    Args:
        what: cannot be done; the beginning of the message about a mistake.
        path: what was read or written, if the error itself does not name it.
    """
    fault = None if _code(error) in _MISTAKES else machine_error(error, path)
    reason = (str(getattr(error, "strerror", "") or error).strip() or type(error).__name__).splitlines()[0]
    return fault or ConfigError(f"{what}: {reason}")


def _code(error: BaseException) -> int | None:
    """The errno of an error, be it named in the text of a library written in Rust."""
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT  # safetensors raises it without a number, also where a permission is missing
    if isinstance(error, OSError):
        return error.errno
    found = _NAMED_CODE.search(str(error)) if isinstance(error, Exception) else None
    return int(found[1] or found[2]) if found else None


def _lacks_memory(error: BaseException, text: str) -> bool:
    return isinstance(error, (RuntimeError, ImportError)) and bool(_NO_MEMORY.search(text))


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else text[:120] + "..."
