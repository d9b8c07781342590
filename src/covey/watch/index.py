"""An SQLite index of the rollouts of a run: filters and a text search that stay quick in a large run.

The index is derived from the run's files and may be deleted at any time. It is a file in covey's cache folder. It holds
numbers, and for each rollout the place of its line; the texts stay in the run's files. One process at a time writes an
index (`update`), and any number may read it (`select`).

The server starts a process that writes them, `python -P -m covey.watch.index` (`Indexer`), because Python would
otherwise share its time with the server's answers. It reads run folders from its standard input, one in JSON a line,
brings the index of each up to date, and ends when the input ends.

Once a text is searched for, the trigrams of the texts are indexed too, if SQLite has FTS5 with its trigram tokenizer.
They find candidates, each of which is compared with its line. That takes several times as long as the numbers, so it is
not done before; rollouts without trigrams are candidates for every text.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from covey.config.files import files_below, make_folder, open_below
from covey.runtime.variables import cache_folder
from covey.tracking.run_folder import ROLLOUTS_FOLDER
from covey.tracking.run_reader import (
    STEP_FILE,
    Group,
    RunReader,
    is_failed,
    is_truncated,
    number,
    parse_line,
    prompt_text,
    rollouts_file,
    searched_text,
)
from covey.watch.rollouts import list_row

SCHEMA_VERSION = 5
BATCH_SECONDS = 0.5  # of the processor's time, of one transaction
BUSY_SECONDS = 5.0  # that a reader waits for a writer
LONGEST_TEXT = 1 << 20  # characters of a rollout that are searched
UNUSED_DAYS = 30  # after which an index is deleted
NICENESS = 10  # of the process that writes indexes
AGAIN_SECONDS = 1.0  # least time between two requests for the same run
SECONDS = 1.5  # for comparing lines with the text that is searched for
MOST_TRIGRAMS = 40  # of that text, for which the index is asked
LONGEST_QUERY = 200  # characters of it

SCHEMA = """
CREATE TABLE files (step INTEGER PRIMARY KEY, inode INTEGER, size INTEGER, mtime_ns INTEGER, texts INTEGER);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, leader INTEGER, step INTEGER, grp INTEGER, place INTEGER, reward REAL,
    truncated INTEGER, failed INTEGER, signal INTEGER, offset INTEGER, length INTEGER
);
CREATE INDEX by_place ON rollouts (step, grp, place);
CREATE INDEX best ON rollouts (reward DESC, step DESC, grp, place);
CREATE INDEX worst ON rollouts (reward, step DESC, grp, place);
"""
TRIGRAMS = "CREATE VIRTUAL TABLE texts USING fts5(text, tokenize='trigram', content='', detail='none')"
TABLES = ("files", "rollouts", "texts")
Signature = tuple[int, int, int]  # inode, size and time of change of a file
Task = tuple[Path, bool]  # a run folder, and True if its texts are indexed too


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
        sqlite3.Error: if it does not exist, or is not an index of this version.
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


def update(run_dir: Path, path: Path, *, texts: bool = False) -> Iterator[None]:
    """Bring an index up to date with the files of its run, the newest steps first; yields after each transaction.

    Nothing happens if another process does it now. A damaged index is made again.

    Args:
        texts: also index the trigrams of the texts, after the numbers of all steps.

    Raises:
        OSError, sqlite3.Error: if the index cannot be written.
    """
    make_folder(path.parent)
    with _writing(path) as is_alone:
        if not is_alone:
            return
        try:
            yield from _update(run_dir, path, texts)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # the disk is full, or the file cannot be written
                raise
            _delete(path)
            yield from _update(run_dir, path, texts)


@contextmanager
def _writing(path: Path) -> Iterator[bool]:
    """Context manager: True if this process alone may write the index, False if another one does."""
    with open(path.with_suffix(".lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _update(run_dir: Path, path: Path, texts: bool) -> Iterator[None]:
    reader = RunReader(run_dir)
    with connection(path, write=True) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        if database.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
            _create(database)
        disk = rollout_files(run_dir)
        known = {row[0]: row[1:] for row in database.execute("SELECT step, inode, size, mtime_ns FROM files")}
        gone = [step for step, signature in known.items() if disk.get(step) != signature]
        if 2 * len(gone) > len(known):  # the trigrams of removed rollouts stay, so begin again
            _create(database)
            known, gone = {}, []
        new = sorted(disk.keys() - (known.keys() - set(gone)), reverse=True)

        def renew(step: int) -> None:
            database.execute("DELETE FROM rollouts WHERE step = ?", (step,))
            database.execute("DELETE FROM files WHERE step = ?", (step,))
            if step in disk:
                _add_numbers(database, reader, step, disk[step])

        yield from _in_batches(database, dict.fromkeys([*gone, *new]), renew)
        if texts and _has_trigrams(database):
            missing = [row[0] for row in database.execute("SELECT step FROM files WHERE NOT texts ORDER BY step DESC")]
            yield from _in_batches(database, missing, lambda step: _add_texts(database, reader, step))


def _in_batches(database: sqlite3.Connection, steps: Iterable[int], change: Callable[[int], None]) -> Iterator[None]:
    """Call `change` for each step, in transactions of a bounded time."""
    began = None
    for step in steps:
        if began is None:
            database.execute("BEGIN IMMEDIATE")
            began = time.process_time()
        change(step)
        if time.process_time() - began > BATCH_SECONDS:
            database.execute("COMMIT")
            began = None
            yield
    if began is not None:
        database.execute("COMMIT")
        yield


def _create(database: sqlite3.Connection) -> None:
    """Make the tables again."""
    database.execute("BEGIN IMMEDIATE")
    for name in TABLES:
        database.execute(f"DROP TABLE IF EXISTS {name}")
    for statement in SCHEMA.strip().split(";\n"):
        database.execute(statement)
    with suppress(sqlite3.OperationalError):  # this SQLite has no FTS5, or not its trigrams
        database.execute(TRIGRAMS)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    database.execute("COMMIT")


def _add_numbers(database: sqlite3.Connection, reader: RunReader, step: int, signature: Signature) -> None:
    """Add the rollouts of a step, without their texts. A file that cannot be read has none."""
    groups: list[Group] = []
    with suppress(OSError):
        groups = reader.groups(step)[0]
    last = database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'rollouts'").fetchone()
    id = last[0] if last else 0
    rows: list[tuple[Any, ...]] = []
    for group in groups:
        leader, signal = id + 1, group.has_signal
        for place, (line, span) in enumerate(zip(group.rollouts, group.places, strict=True)):
            id += 1
            reward = number(line.get("reward"))
            flags = is_truncated(line), is_failed(line), signal
            rows.append((id, leader, step, group.number, place, reward, *flags, *span))
    database.executemany(f"INSERT INTO rollouts VALUES ({', '.join('?' * 11)})", rows)
    database.execute("INSERT INTO files VALUES (?, ?, ?, ?, 0)", (step, *signature))


def _add_texts(database: sqlite3.Connection, reader: RunReader, step: int) -> None:
    """Add the trigrams of a step's texts: those of completion `id` as row 2 id, of a group's prompt as 2 leader + 1."""
    groups: list[Group] = []
    with suppress(OSError):
        groups = reader.groups(step)[0]
    found = {group.number: group for group in groups}
    rows = []
    for id, leader, group, place in database.execute(
        "SELECT id, leader, grp, place FROM rollouts WHERE step = ?", (step,)
    ):
        lines = found[group].rollouts if group in found else []
        if place < len(lines):  # else the file has changed, and the step will be renewed
            rows.append((2 * id, _searchable(searched_text(lines[place]))))
            if id == leader:
                rows.append((2 * id + 1, _searchable(prompt_text(lines[place].get("prompt")))))
    database.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", rows)
    database.execute("UPDATE files SET texts = 1 WHERE step = ?", (step,))


def _has_trigrams(database: sqlite3.Connection) -> bool:
    return bool(database.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone())


def _searchable(content: str) -> str:
    """The text as SQLite takes it: valid, and without NUL, which would end it."""
    return content[:LONGEST_TEXT].encode("utf-8", "replace").decode().replace("\0", " ")


def rollout_files(run_dir: Path) -> dict[int, Signature]:
    """The files of rollouts by step; {} if there are none."""
    try:
        files = files_below(run_dir, ROLLOUTS_FOLDER)
    except OSError:
        return {}
    return {int(match[1]): _signature(status) for name, status in files if (match := STEP_FILE.fullmatch(name))}


def progress(run_dir: Path, path: Path) -> dict[str, Any]:
    """The table INDEX of the API."""
    files = len(RunReader(run_dir).rollout_steps())
    try:
        with connection(path) as database:
            indexed, texts = database.execute("SELECT count(*), coalesce(sum(texts), 0) FROM files").fetchone()
    except sqlite3.Error:
        return {"state": "absent" if files else "ready", "files": files, "indexed": 0, "texts": 0}
    state = "ready" if indexed >= files else "building"
    return {"state": state, "files": files, "indexed": min(indexed, files), "texts": min(texts, files)}


def delete_unused(folder: Path) -> None:
    """Delete indexes that nothing has written for a month."""
    with suppress(OSError):
        for path in folder.glob("*.sqlite"):
            if time.time() - path.stat().st_mtime > UNUSED_DAYS * 86400:
                with _writing(path) as is_alone:
                    if is_alone:  # the file of an index that is being written may be old: new rows are in its journal
                        _delete(path)
                        path.with_suffix(".lock").unlink(missing_ok=True)


class Indexer:
    """Starts the process when it is first needed, and asks it to index runs. A context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[Path, float] = {}  # run folder -> when it was asked for
        self._searched: set[Path] = set()  # those whose texts were asked for
        self._lock = threading.Lock()

    def __enter__(self) -> Indexer:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.3)
                self._process.kill()
                self._process.wait()

    @property
    def wanted(self) -> set[Path]:
        """The run folders that were asked for."""
        return set(self._asked)

    def ask(self, run_dir: Path, *, texts: bool = False) -> None:
        """Have the index of a run brought up to date. A process that has died is started again.

        Args:
            texts: index the texts too, from now on.
        """
        with self._lock:
            if texts and run_dir not in self._searched:
                self._searched.add(run_dir)
                self._asked.pop(run_dir, None)
            if time.monotonic() - self._asked.get(run_dir, float("-inf")) < AGAIN_SECONDS:
                return
            self._asked[run_dir] = time.monotonic()
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "covey.watch.index"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            assert self._process.stdin is not None
            with suppress(OSError):
                line = json.dumps([os.fsdecode(run_dir), run_dir in self._searched])
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()


def main() -> None:
    """Index the runs that the standard input names, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which closes the input
    with suppress(OSError):
        os.nice(NICENESS)
    asked: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    delete_unused(index_folder())
    waiting: list[Task] = []
    while True:
        waiting = list(dict.fromkeys([*waiting, *_drain(asked)])) or [asked.get()]
        task = run_dir, texts = waiting.pop()  # what was asked for last comes first
        with suppress(OSError, sqlite3.Error):
            for _ in update(run_dir, index_path(run_dir), texts=texts):
                newer = [other for other in _drain(asked) if other != task]
                if newer:
                    waiting += [task, *newer]
                    break


def _read(asked: queue.SimpleQueue[Task]) -> None:
    for line in sys.stdin.buffer:
        with suppress(ValueError, TypeError):
            name, texts = json.loads(line)
            asked.put((Path(name), bool(texts)))
    os._exit(0)  # an index survives that, as its transactions do


def _drain(asked: queue.SimpleQueue[Task]) -> list[Task]:
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(asked.get_nowait())
    return found


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


if __name__ == "__main__":
    main()
