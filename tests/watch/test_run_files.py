"""Files of a run folder that are none: no answer of `covey watch` waits for them, reads them, or fails unexpectedly."""

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from covey.config.files import Refused, TooLarge
from covey.tracking import run_reader
from covey.tracking.run_reader import MetricTable
from covey.watch.answers import Answers, NotFound
from covey.watch.files import open_recording
from covey.watch.index import Query, index_path, update
from covey.watch.library import Library
from covey.watch.server import Events
from helpers.large_run import write_run

NAMES = (
    "config.toml", "origin.json", "metrics.jsonl", "summary.json", "stopped.json", "iterations.jsonl", "covey.lock",
    "covey.log", "curve.png", "rollouts", "rollouts/step_000002.jsonl", "held_out", "held_out/step_000000.jsonl",
    "held_out/step_000002.jsonl", "checkpoints", "checkpoints/step-00000002/manifest.json",
)  # fmt: skip


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # an address has about 100 bytes


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 42)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": bound_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "huge": huge,
    "loop": lambda path: path.symlink_to(path.name),
    "nested": lambda path: path.write_text("[" * 100_000 + "\n"),
    "zeros": lambda path: path.write_bytes(bytes(1 << 20)),
}


class NoIndexer:
    wanted = frozenset[Path]()

    def ask(self, run_dir: Path, *, texts: bool = False) -> None:
        """Start nothing."""


@contextmanager
def openings(root: Path) -> Iterator[list[Path]]:
    """Context manager with the pipes below a folder that were opened for reading; each reader then gets its end."""
    pipes, opened, ended = [path for path in root.rglob("*") if path.is_fifo()], [], threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            for path in pipes:
                with suppress(OSError):  # nobody reads it
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                    opened.append(path)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield opened
    finally:
        ended.set()
        thread.join()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_run_stops_the_answers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "whole", 2, 4, words=3)
    for number, name in enumerate(NAMES):
        run = tmp_path / "runs" / f"run-{number}"
        shutil.copytree(tmp_path / "whole", run)
        (run / "covey.lock").touch()  # so that a run without metrics is one
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        KINDS[kind](path)
    library = Library([tmp_path / "runs"])
    indexer: Any = NoIndexer()
    answers = Answers(library, indexer)
    with openings(tmp_path) as opened:
        assert len(answers.runs()["runs"]) == len(NAMES)
        assert len(Events(library, indexer, lambda: False)._read()) == len(NAMES)
        for run in library.runs():
            list(update(run.folder, index_path(run.folder), texts=True))
            found = answers.run(run.id)
            assert found["last_step"] == (0 if run.folder == tmp_path / "runs" / "run-2" else 2)
            answers.metrics(run.id, None, 100, 0, None)
            answers.rollouts(run.id, Query("", "a", 0, 9, 0, 9))
            answers.diagnosis(run.id)
            for ask in (
                lambda run: answers.groups(run.id, 2),
                lambda run: answers.group(run.id, 2, 0),
                lambda run: answers.held_out(run.id, None, None, None, order="problem", kind="", wanted="", offset=0,
                                             limit=9),
                lambda run: open_recording(run.folder, "curve.png").opened.close(),
            ):  # fmt: skip
                with suppress(NotFound, Refused, TooLarge, OSError):
                    ask(run)
    assert not opened


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", 3, 3, words=2)
    known = run_reader.parse_metrics
    appended = []

    def append_one(line: bytes) -> dict[str, Any] | None:
        if len(appended) < 100:
            appended.append(line)
            with open(run / "metrics.jsonl", "ab") as file:
                file.write(b'{"step": %d}\n' % (3 + len(appended)))
        return known(line)

    monkeypatch.setattr(run_reader, "parse_metrics", append_one)
    table = MetricTable(run)
    table.update()
    assert (table.last_step, len(appended)) == (3, 3)
    table.update()
    assert table.last_step == 6
