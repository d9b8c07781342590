"""An SQLite index of the rollouts of a run: filters and a text search that stay quick in a large run.

The index is derived from the run's files and may be deleted at any time. It is a file in covey's cache folder. It holds
numbers, and for each rollout the place of its line; the texts stay in the run's files. If SQLite has FTS5 with its
trigram tokenizer, a table of trigrams finds candidates for a text, and each candidate is compared with its line;
without it, every line is. One process at a time writes an index (`update`), and any number may read it (`select`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.runtime.cache import cache_folder, make_folder
from covey.tracking.plain_files import Refused, TooLarge, files_below
from covey.tracking.run_folder import ROLLOUTS_FOLDER
from covey.tracking.run_reader import STEP_FILE, RunReader, number, prompt_text, text
from covey.watch.rollouts import is_failed, is_truncated

SCHEMA_VERSION = 1
BATCH_SECONDS = 0.3  # of one transaction
BUSY_SECONDS = 5.0  # that a reader waits for a writer
LONGEST_TEXT = 1 << 20  # characters of a rollout that are searched
UNUSED_DAYS = 30  # after which an index is deleted

SCHEMA = """
CREATE TABLE files (step INTEGER PRIMARY KEY, inode INTEGER, size INTEGER, mtime_ns INTEGER);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, leader INTEGER, step INTEGER, grp INTEGER, place INTEGER, reward REAL,
    truncated INTEGER, failed INTEGER, signal INTEGER, offset INTEGER, length INTEGER
);
CREATE INDEX by_place ON rollouts (step, grp, place);
CREATE INDEX by_reward ON rollouts (reward, step);
"""
TRIGRAMS = "CREATE VIRTUAL TABLE texts USING fts5(text, tokenize='trigram', content='', detail='none')"
TABLES = ("files", "rollouts", "texts")
Signature = tuple[int, int, int]  # inode, size and time of change of a file


@dataclass(frozen=True)
class Filter:
    """A choice of rollouts and their order, in SQL."""

    condition: str = "1"
    order: str = "step DESC, grp, place"


FILTERS = {
    "": Filter(),
    "best": Filter("reward IS NOT NULL", "reward DESC, step DESC, grp, place"),
    "worst": Filter("reward IS NOT NULL", "reward, step DESC, grp, place"),
    "truncated": Filter("truncated"),
    "failed": Filter("failed"),
    "no_signal": Filter("NOT signal AND NOT failed"),
}


def index_folder() -> Path:
    """The folder of the indexes."""
    return cache_folder() / "watch"


def index_path(run_dir: Path) -> Path:
    """The index of the run in a folder."""
    return index_folder() / f"{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:32]}.sqlite"


@contextmanager
def connection(path: Path, *, write: bool = False) -> Iterator[sqlite3.Connection]:
    """Context manager: a connection to an index that exists.

    Raises:
        sqlite3.Error: if it does not exist, or is no index of this version.
    """
    opened = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={'rwc' if write else 'ro'}", uri=True, timeout=BUSY_SECONDS,
        isolation_level=None, check_same_thread=False,
    )  # fmt: skip
    try:
        if not write and opened.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
            raise sqlite3.DatabaseError("it is an index of another version")
        yield opened
    finally:
        opened.close()


def update(run_dir: Path, path: Path) -> Iterator[None]:
    """Bring an index up to date with the files of its run, the newest steps first; yields after each transaction.

    Nothing happens if another process does it now. A damaged index is made anew.

    Raises:
        OSError, sqlite3.Error: if the index cannot be written.
    """
    make_folder(path.parent)
    with open(path.with_suffix(".lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        try:
            yield from _update(run_dir, path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # the disk is full, or the file cannot be written
                raise
            _delete(path)
            yield from _update(run_dir, path)


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _update(run_dir: Path, path: Path) -> Iterator[None]:
    with connection(path, write=True) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        if database.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
            _create(database)
        disk = rollout_files(run_dir)
        known = {row[0]: row[1:] for row in database.execute("SELECT step, inode, size, mtime_ns FROM files")}
        gone = [step for step, signature in known.items() if disk.get(step) != signature]
        if 2 * len(gone) > len(known):  # the trigrams of removed rollouts stay, so begin anew
            _create(database)
            known, gone = {}, []
        new = sorted((step for step in disk if step not in known or known[step] != disk[step]), reverse=True)
        reader = RunReader(run_dir)
        for batch in _batches([*gone, *new]):
            database.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            for step in batch:
                database.execute("DELETE FROM rollouts WHERE step = ?", (step,))
                database.execute("DELETE FROM files WHERE step = ?", (step,))
                if step in disk:
                    _add(database, reader, step, disk[step])
                if time.monotonic() - began > BATCH_SECONDS:
                    database.execute("COMMIT")
                    yield
                    database.execute("BEGIN IMMEDIATE")
                    began = time.monotonic()
            database.execute("COMMIT")
            yield


def _batches(steps: list[int]) -> Iterator[list[int]]:
    steps = list(dict.fromkeys(steps))
    for begin in range(0, len(steps), 1000):
        yield steps[begin : begin + 1000]


def _create(database: sqlite3.Connection) -> None:
    """Make the tables anew."""
    database.execute("BEGIN IMMEDIATE")
    for name in TABLES:
        database.execute(f"DROP TABLE IF EXISTS {name}")
    for statement in SCHEMA.strip().split(";\n"):
        database.execute(statement)
    with suppress(sqlite3.OperationalError):  # this SQLite has no FTS5, or not its trigrams
        database.execute(TRIGRAMS)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    database.execute("COMMIT")


def _add(database: sqlite3.Connection, reader: RunReader, step: int, signature: Signature) -> None:
    """Add the rollouts of a step."""
    has_texts = has_trigrams(database)
    try:
        groups, _ = reader.groups(step)
    except (OSError, Refused, TooLarge):
        groups = []
    last = database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'rollouts'").fetchone()
    id = last[0] if last else 0
    rows: list[tuple[Any, ...]] = []
    texts: list[tuple[int, str]] = []
    for group in groups:
        leader, signal = id + 1, group.has_signal
        texts.append((2 * leader + 1, _searchable(prompt_text(group.rollouts[0].get("prompt")))))
        for place, (line, (offset, length)) in enumerate(zip(group.rollouts, group.places, strict=True)):
            id += 1
            reward = number(line.get("reward"))
            rows.append((id, leader, step, group.number, place, reward, is_truncated(line), is_failed(line), signal,
                         offset, length))  # fmt: skip
            texts.append((2 * id, _searchable(text(line.get("text")))))
    database.executemany(f"INSERT INTO rollouts VALUES ({', '.join('?' * 11)})", rows)
    if has_texts:
        database.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)
    database.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (step, *signature))


def has_trigrams(database: sqlite3.Connection) -> bool:
    """True if the index has a table of trigrams."""
    return bool(database.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone())


def _searchable(content: str) -> str:
    return content[:LONGEST_TEXT].encode("utf-8", "replace").decode()


def rollout_files(run_dir: Path) -> dict[int, Signature]:
    """The files of rollouts by step; {} if there are none."""
    try:
        files = files_below(run_dir, ROLLOUTS_FOLDER)
    except (OSError, Refused):
        return {}
    return {
        int(match[1]): (status.st_ino, status.st_size, status.st_mtime_ns)
        for name, status in files
        if (match := STEP_FILE.fullmatch(name))
    }


def progress(run_dir: Path, path: Path) -> dict[str, Any]:
    """The table INDEX of the API."""
    files = len(RunReader(run_dir).rollout_steps())
    try:
        with connection(path) as database:
            indexed = database.execute("SELECT count(*) FROM files").fetchone()[0]
    except sqlite3.Error:
        return {"state": "absent" if files else "ready", "files": files, "indexed": 0}
    return {"state": "ready" if indexed >= files else "building", "files": files, "indexed": min(indexed, files)}


def delete_unused(folder: Path) -> None:
    """Delete indexes that nothing has written for a month."""
    with suppress(OSError):
        for path in folder.glob("*.sqlite"):
            if time.time() - path.stat().st_mtime > UNUSED_DAYS * 86400:
                _delete(path)
                path.with_suffix(".lock").unlink(missing_ok=True)
