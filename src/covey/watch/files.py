"""Files that the server sends as they are: those of the page, and pictures and recordings of a run."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from covey.config.files import LARGEST_FILE, Refused, TooLarge, files_below, open_below

STATIC = Path(__file__).parent / "static"
PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
# Of a run. No SVG, which may hold scripts.
RECORDING_TYPES = {
    ".png": "image/png",
    ".gif": "image/gif",
    ".jpg": "image/jpeg",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
CHUNK = 1 << 18  # bytes that are sent at once


@dataclass
class OpenFile:
    """A file that is open for sending."""

    file: BinaryIO
    size: int
    type: str
    opened: ExitStack

    def parts(self) -> Iterator[bytes]:
        """The content, as long as it was when the file was opened; then the file is closed."""
        left = self.size
        with self.opened:
            while left and (part := self.file.read(min(CHUNK, left))):
                left -= len(part)
                yield part


def open_static(path: str) -> OpenFile:
    """A file of the page.

    Raises:
        Refused: for a path that leads elsewhere.
        OSError: if there is no such file.
    """
    parts = path.split("/")
    return _open(STATIC, parts, PAGE_TYPES)


def open_recording(run_dir: Path, name: str) -> OpenFile:
    """A picture or recording of a run.

    Raises:
        Refused: for a name that is not of one.
        OSError: if there is no such file.
        TooLarge: if it is too large to send.
    """
    return _open(run_dir, [name], RECORDING_TYPES)


def recordings(run_dir: Path) -> list[dict[str, Any]]:
    """The key "files" of the API."""
    try:
        files = sorted(files_below(run_dir), key=lambda item: item[0])
    except OSError:
        return []
    typed = [(name, status.st_size, _type(name, RECORDING_TYPES)) for name, status in files]
    return [
        {"name": name, "bytes": size, "kind": type.partition("/")[0], "type": type}
        for name, size, type in typed
        if type is not None and size <= LARGEST_FILE
    ]


def last_recording(run_dir: Path) -> float:
    """The time when a picture or recording was last written, in seconds since the epoch; 0 if there is none."""
    try:
        times = [status.st_mtime for name, status in files_below(run_dir) if _type(name, RECORDING_TYPES)]
    except OSError:
        return 0.0
    return max(times, default=0.0)


def _open(folder: Path, parts: list[str], types: dict[str, str]) -> OpenFile:
    type = _type(parts[-1], types)
    if type is None or not all(map(NAME.fullmatch, parts)):
        raise Refused("files of this name are not shown")
    with ExitStack() as opening:
        file = opening.enter_context(open_below(folder, *parts))
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_FILE:
            raise TooLarge(f"{parts[-1]} has more than {LARGEST_FILE >> 20} MiB, so it is not sent")
        return OpenFile(file, size, type, opening.pop_all())


def _type(name: str, types: dict[str, str]) -> str | None:
    return types.get(Path(name).suffix.lower()) if NAME.fullmatch(name) else None
