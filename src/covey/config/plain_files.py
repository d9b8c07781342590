"""Opens files below a folder for a reader that must not leave it: no links, plain files only, of bounded size."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from covey.config.common import ConfigError

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
        if not stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
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


def _open(name: str, flags: int, folder: int, path: Path) -> int:
    try:
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
