"""Rollouts of a run by filter and text, from its index."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from covey.config.files import open_below
from covey.tracking.run_reader import parse_line, rollouts_file
from covey.watch.index import FILTERS, Signature, connection
from covey.watch.rollouts import list_row

SECONDS = 1.5  # for comparing lines with the text
MOST_TRIGRAMS = 40  # of a text that the index is asked for
LONGEST_TEXT = 200  # characters


@dataclass(frozen=True)
class Query:
    """What is searched for."""

    filter: str = ""  # a key of `FILTERS`
    text: str = ""  # that the completion or the prompt contains, in any case
    first: int = 0  # step
    last: int = 1 << 62
    offset: int = 0  # candidates to skip: a multiple of nothing, taken from the answer before
    limit: int = 50


def select(run_dir: Path, path: Path, query: Query) -> dict[str, Any]:
    """The rollouts that a query selects, without the key "index" of the API.

    It ends after that time even if there may be more, so that "rollouts" may have fewer than the limit although
    "next_offset" says where to go on.

    Raises:
        sqlite3.Error: if there is no index.
    """
    found: list[dict[str, Any]] = []
    needle = _in_json(query.text)
    seen, deadline, is_complete = 0, time.monotonic() + SECONDS, True
    with connection(path) as database, _Lines(run_dir, database) as lines:
        condition, values = _condition(database, query)
        total = database.execute(f"SELECT count(*) FROM rollouts WHERE {condition}", values).fetchone()[0]
        chosen = f"SELECT step, grp, place, signal, offset, length FROM rollouts WHERE {condition}"
        ordered = f"{chosen} ORDER BY {FILTERS[query.filter].order} LIMIT -1 OFFSET ?"
        rows = database.execute(ordered, (*values, query.offset))
        for *place, signal, offset, length in rows:
            if len(found) == query.limit or (seen and time.monotonic() > deadline):
                is_complete = False
                break
            seen += 1
            line = lines.read(place[0], offset, length, needle)
            row = line and list_row((place[0], place[1], place[2]), line, bool(signal), query.text)
            if row:
                found.append(row)
    if query.text:
        total = len(found) if is_complete and not query.offset else None
    next_offset = None if is_complete else query.offset + seen
    return {"total": total, "offset": query.offset, "next_offset": next_offset, "rollouts": found}


def _condition(database: sqlite3.Connection, query: Query) -> tuple[str, tuple[Any, ...]]:
    """The SQL condition of the candidates, and its values."""
    # Without the plus, SQLite finds the steps in an index and sorts all of their rollouts by reward.
    condition, values = f"+step BETWEEN ? AND ? AND {FILTERS[query.filter].condition}", (query.first, query.last)
    if len(query.text) < 3 or not database.execute("SELECT 1 FROM files WHERE texts LIMIT 1").fetchone():
        return condition, values
    hits = "(SELECT rowid FROM texts WHERE texts MATCH ?)"  # of completions at 2 id, of prompts at 2 leader + 1
    match = " AND ".join(_trigrams(query.text))
    unknown = "step IN (SELECT step FROM files WHERE NOT texts)"
    return f"{condition} AND (2 * id IN {hits} OR 2 * leader + 1 IN {hits} OR {unknown})", (*values, match, match)


def _trigrams(text: str) -> Iterator[str]:
    """Up to `MOST_TRIGRAMS` trigrams of a text, spread over it, quoted for FTS5."""
    found = list(dict.fromkeys(text[at : at + 3] for at in range(len(text) - 2)))
    for trigram in found[:: -(-len(found) // MOST_TRIGRAMS)]:
        yield '"' + trigram.replace('"', '""') + '"'


def _in_json(text: str) -> bytes:
    """A part of every JSON that contains the text, in lower case; empty if its characters may be escaped there."""
    is_plain = text.isascii() and text.isprintable() and not set(text) & set('"\\/')
    return text.lower().encode() if is_plain else b""


class _Lines:
    """Reads single lines of files of rollouts that have not changed since they were indexed. A context manager."""

    def __init__(self, run_dir: Path, database: sqlite3.Connection) -> None:
        self._run_dir = run_dir
        self._database = database
        self._step: int | None = None
        self._file: BinaryIO | None = None
        self._opened = ExitStack()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read(self, step: int, offset: int, length: int, needle: bytes = b"") -> dict[str, Any] | None:
        """A line; None if the file has changed, or if the line does not contain the needle, in any case."""
        if step != self._step:
            self._open(step)
        if self._file is None:
            return None
        with suppress(OSError):
            content = os.pread(self._file.fileno(), length, offset)
            return parse_line(content) if needle in content.lower() else None
        return None

    def _open(self, step: int) -> None:
        self._opened.close()
        self._step, self._file = step, None
        known = self._database.execute("SELECT inode, size, mtime_ns FROM files WHERE step = ?", (step,)).fetchone()
        with suppress(OSError):
            file = self._opened.enter_context(open_below(self._run_dir, *rollouts_file(step)))
            if _signature(os.fstat(file.fileno())) == known:
                self._file = file


def _signature(status: os.stat_result) -> Signature:
    return status.st_ino, status.st_size, status.st_mtime_ns
