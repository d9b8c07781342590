"""Reads files safely, and says in one line what is wrong.

The user's files: valid paths, plain files of bounded size, UTF-8, and TOML and JSON with bounded nesting, integers of
64 bits and no duplicate key. Faults of the machine: a full disk, a missing permission, too little memory. Files below a
folder for a reader that must not leave it (`open_below`): no links, plain files only.
"""

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from covey.config.common import ConfigError, MachineError

LARGEST_DOCUMENT = 16 << 20  # bytes of a JSON document; real ones have a few kilobytes
LONGEST_MODEL_CONFIG = 1 << 20  # bytes of a config.json
LARGEST_RECIPE = 1 << 20  # bytes of a TOML file
DEEPEST = 64  # levels of lists and tables within each other
LONGEST_INTEGER = 1000  # digits in JSON
MOST_DOTS = 1000  # in a TOML key: the time to parse a dotted key is quadratic in them
SHOWN_CHARACTERS = 80  # of a value quoted in a message

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def shortened(text: str) -> str:
    """The text in quotes for a message, truncated if it is long."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents with mode 700.

    Raises:
        OSError: if it cannot be created.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)  # another process may create it first


def user_path(name: str | Path, where: str = "") -> Path:
    """Parse a path that the user wrote and expand `~`. The path is valid, but need not exist.

    Args:
        where: beginning of an error message, the field or option, such as "task.path: ".

    Raises:
        ConfigError: for a name that no file can have, such as one with a NUL character or over-long parts, an unknown
            user's home folder, or a loop of links.
        MachineError: if a folder on the way may not be entered, or another fault of the machine.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise path_error(error, f"{where}{shortened(str(name))} cannot be used as a path", path) from error
    except RuntimeError as error:
        raise ConfigError(f"{where}{shortened(str(name))}: the home folder of that user is not known") from error
    except ValueError as error:
        raise ConfigError(f"{where}{shortened(str(name))} holds characters that no path can have") from error
    return path


def unusual_kind(path: Path) -> str:
    """'a folder', 'a pipe', 'a socket' or 'a device'; '' for a plain file or a missing one."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "")
    except OSError:
        return ""


def read_file(path: Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """The bytes of a plain file.

    Raises:
        ConfigError: if it is missing, no plain file, or larger than `most` bytes.
        MachineError: if it may not be read, or the disk has a fault.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe would block
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}; name a file")
            if status.st_size > most:
                raise ConfigError(f"{path} has {status.st_size / 1e6:,.0f} MB; at most {most / 1e6:,.0f} MB are read")
            return file.read()
    except OSError as error:
        raise path_error(error, f"cannot read {path}", path) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; a byte order mark at its beginning is skipped.

    Raises:
        ConfigError: if it cannot be read or is not valid TOML, for values nested too deeply and integers over 64 bits.
    """
    return parse_toml(read_file(path, LARGEST_RECIPE), path)


def parse_toml(content: bytes, path: Path | str) -> dict[str, Any]:
    """The tables in the content of the TOML file at `path`, which error messages name.

    Raises:
        ConfigError: as `read_toml`.
    """
    try:
        text = content.decode("utf-8-sig")
        for number, line in enumerate(text.splitlines(), start=1):
            if line.partition("=")[0].count(".") > MOST_DOTS:
                raise ValueError(f"nested too deeply (at line {number})")
        tables = tomllib.loads(text)
        check_nesting(tables)
        for where, value in walk(tables):
            if type(value) is int and not -(2**63) <= value < 2**63:
                raise ValueError(f"{where} is an integer of more than 64 bits")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: it is not UTF-8 text ({error.reason})") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: nested too deeply") from error
    except ValueError as error:
        reason = "an integer has too many digits" if "integer string conversion" in str(error) else error
        raise ConfigError(f"{path} is not valid TOML: {reason}") from error
    return tables


def parse_json(text: bytes | str, *, strict: bool = True) -> Any:
    """Parse a JSON document.

    Args:
        strict: refuse NaN and infinities, which are not JSON; covey's own files may have them.

    Raises:
        ValueError: in one line, for invalid JSON or UTF-8, a duplicate key of an object, values nested too deeply, or
            an integer of more than 1,000 digits.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        constants: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if strict else {}
        document = json.loads(decoded, object_pairs_hook=_unique, parse_int=_integer, **constants)
        if decoded.count("[") + decoded.count("{") > DEEPEST:  # else it cannot be nested deeper
            check_nesting(document)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} character {error.colno}" if error.lineno > 1 else f"character {error.colno}"
        raise ValueError(f"not valid JSON: {error.msg} at {where}") from None
    except UnicodeDecodeError:
        raise ValueError("not valid UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return document


def read_json(path: Path, most: int = LARGEST_DOCUMENT, *, strict: bool = True) -> Any:
    """Read a JSON file with `parse_json`.

    Raises:
        ConfigError: if it cannot be read or is not valid.
    """
    try:
        return parse_json(read_file(path, most), strict=strict)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def check_nesting(document: Any) -> None:
    """Refuse lists and dicts that are nested more than `DEEPEST` levels.

    Raises:
        ValueError: for such a document.
    """
    level = [document]
    for _ in range(DEEPEST + 1):
        level = [inner for value in level for inner in _items(value)]
        if not level:
            return
    raise ValueError("nested too deeply")


def walk(document: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over every value below a document that `check_nesting` accepts: (dotted name, value)."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document, start=1)
    for key, value in pairs:
        name = f"{where}.{key}" if where else str(key)
        if isinstance(value, (dict, list)):
            yield from walk(value, name)
        else:
            yield name, value


def _items(value: Any) -> list[Any]:
    """The lists and dicts directly below a value."""
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in below if isinstance(item, (dict, list))]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shortened(again)} is there twice")
    return document


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"an integer has {len(digits):,} digits, more than {LONGEST_INTEGER:,}")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON: write null or a number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {shortened(digits)} is too large")
    return number


def sync(path: Path) -> None:
    """fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_assignments(entries: Sequence[str], where: str, *, example: str, taken: Sequence[str]) -> dict[str, Any]:
    """Name -> value of the entries.

    Args:
        entries: one assignment each.
        where: name of the field, for messages.
        example: two entries in Python syntax, for messages.
        taken: names that covey sets itself.

    Raises:
        ConfigError: for an entry that is not a TOML assignment, and for a name that is taken or there twice.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        fault = ""
        try:
            pairs = parse_toml(entry.encode(), "it")
        except ConfigError as error:
            pairs, fault = {}, f" ({error})"
        if len(pairs) != 1 or "\n" in entry or any(isinstance(value, dict) for value in pairs.values()):
            raise ConfigError(
                f"{where} has {shortened(entry)}: an option is a name and its value in TOML, {example}{fault}"
            )
        [(name, value)] = pairs.items()
        if name in taken:
            raise ConfigError(f"{where} has {name}, which covey sets itself: remove it")
        if name in found:
            raise ConfigError(f"{where} has {name} twice")
        found[name] = value
    return found


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
# Messages of torch, oneDNN, C++, CUDA and its libraries for a failed allocation, of Python for a thread without a
# stack, of the linker. cuBLAS says that it is not initialized if its handle finds no memory.
_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|bad_alloc|could not create a memory|out of memory|Cannot allocate memory"
    r"|can't start new thread|failed to map segment|_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED",
    re.IGNORECASE,
)
# Forms in which libraries written in Rust, such as safetensors, and torch, when it opens their files, print an errno.
_NAMED_CODE = re.compile(r"\(os error (\d+)\)|unable to \w+ .*file.*: .* \((\d+)\)")


class MemoryFault(MachineError):
    """Too little memory."""

    def __init__(self, reason: str, phase: str = "", remedy: str = _LESS_MEMORY) -> None:
        """`reason` is a library's text, `phase` such as " in the update"."""
        super().__init__(f"there is not enough memory{phase} ({reason}): {remedy}")
        self.reason = reason


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
    lacks_memory = code is None and isinstance(error, (RuntimeError, ImportError)) and _NO_MEMORY.search(text)
    if isinstance(error, MemoryError) or code == errno.ENOMEM or lacks_memory:
        return MemoryFault((text if len(text) <= 120 else text[:120] + "...") or "MemoryError")
    if code is None:
        return None
    name = getattr(error, "filename", None) or path
    where = f"cannot use {os.fsdecode(name)}" if name else "a file cannot be used"
    return MachineError(f"{where} ({os.strerror(code)}): {_ADVICE.get(code, 'mend that')}")


def raise_fault(error: Exception) -> None:
    """Raise `error` again if it is a fault of the machine, in a handler for code that may not support what is tried."""
    if machine_error(error):
        raise error


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


LARGEST_FILE = 256 << 20  # bytes of a file that is read whole
LARGEST_RECORDS = 4 << 30  # bytes of the records of a whole training
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would block


class Refused(ConfigError, OSError):
    """A name that leads out of the folder, or is not a plain file; the message is one line.

    A reader that does without unreadable files skips it with them, and a command tells it to the user.
    """


class TooLarge(Refused):
    """A file that is larger than the reader's limit; the message is one line."""


@contextmanager
def open_below(folder: Path, *parts: str) -> Iterator[BufferedReader]:
    """Context manager: a plain file below `folder`, open for reading.

    Args:
        folder: an existing folder, which may be a link itself.
        parts: the names of the folders on the way and of the file. None of them may be a link.

    Raises:
        Refused: for a link, a folder, a pipe, a device or a socket, and for a part that is not a name.
        OSError: if the file does not exist or cannot be read.
    """
    with _folder_below(folder, *parts[:-1]) as descriptor:
        name = _checked(parts[-1])
        path = folder.joinpath(*parts)
        with _naming(path):
            is_plain = stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
        if not is_plain:
            raise Refused(f"{path} is a link or not a plain file: remove it")
        file = _open(name, _READ, descriptor, path)
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # it was replaced in between
            raise Refused(f"{path} is a link or not a plain file: remove it")
        yield opened


@contextmanager
def append_below(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Context manager: a plain file in `folder`, open for appending; it is created if it does not exist.

    Raises:
        Refused: for a link, a folder, a pipe, a device or a socket.
        OSError: if it cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with _folder_below(folder) as descriptor:
        file = _open(_checked(name), flags, descriptor, folder / name)
    if not stat.S_ISREG(os.fstat(file).st_mode):  # a device, or a pipe that another process reads
        os.close(file)
        raise Refused(f"{folder / name} is a link or not a plain file: remove it")
    with open(file, "ab") as opened:
        yield opened


def read_below(folder: Path, *parts: str, most: int = LARGEST_FILE) -> bytes:
    """The bytes of a plain file below `folder`.

    Raises:
        Refused, OSError: as `open_below`.
        TooLarge: if it has more than `most` bytes.
    """
    with open_below(folder, *parts) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise TooLarge(f"{folder.joinpath(*parts)} has more than {most >> 20} MiB: remove it")
        content = file.read(size + 1)  # it may have grown
    return content[:most]


def read_end(folder: Path, *parts: str, most: int) -> tuple[bytes, bool]:
    """The last bytes of a plain file below `folder`, at most `most`, and True if they are all.

    Raises:
        Refused, OSError: as `open_below`.
    """
    with open_below(folder, *parts) as file:
        begin = max(0, file.seek(0, os.SEEK_END) - most)
        file.seek(begin)
        return file.read(most), not begin


def files_below(folder: Path, *parts: str) -> list[tuple[str, os.stat_result]]:
    """Name and status of each plain file in a folder below `folder`, in no order; empty if there is no such folder.

    Raises:
        Refused: for a link.
        OSError: if it cannot be read.
    """
    found = []
    try:
        with _folder_below(folder, *parts) as descriptor, os.scandir(descriptor) as entries:
            for entry in entries:
                with suppress(OSError):  # deleted in between
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append((entry.name, status))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return found


def status_below(folder: Path, *parts: str) -> os.stat_result | None:
    """The status of a plain file below `folder`; None if there is none that could be opened."""
    try:
        with _folder_below(folder, *parts[:-1]) as descriptor:
            status = os.stat(_checked(parts[-1]), dir_fd=descriptor, follow_symlinks=False)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


@contextmanager
def _folder_below(folder: Path, *parts: str) -> Iterator[int]:
    """Context manager: the descriptor of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            inner = _open(_checked(part), _READ | os.O_DIRECTORY, descriptor, folder.joinpath(*parts))
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context manager whose errors have the whole path; the system's have the name in its folder."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _open(name: str, flags: int, folder: int, path: Path) -> int:
    try:
        with _naming(path):
            return os.open(name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        is_link = error.errno in (errno.ELOOP, errno.EMLINK)
        if error.errno == errno.ENOTDIR:  # Linux's answer for a link where a folder is expected
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        if is_link or error.errno == errno.ENXIO:
            raise Refused(f"{path} is a link or not a plain file: remove it") from error
        raise


def _checked(part: str) -> str:
    if part in ("", ".", "..") or "/" in part or "\0" in part:
        raise Refused("that is not a name of a file")
    return part
