"""The state of a run is read from its files and its lock, without disturbing the run."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from covey.config import ConfigError
from covey.data import StepRecord
from covey.tracking import run_folder as module
from covey.tracking.run_folder import (
    FolderLock,
    RunState,
    checkpoint_steps,
    find_runs,
    last_change,
    last_step,
    run_state,
)
from covey.tracking.run_store import RunStore


def make_run(folder: Path, steps: int = 3, *, checkpoints: tuple[int, ...] = (), files: tuple[str, ...] = ()) -> Path:
    """A run that has recorded some steps, by the class that writes runs."""
    with RunStore(folder) as store:
        (folder / "config.toml").write_text("steps = 5\n")
        for step in range(1, steps + 1):
            store.record(StepRecord(step, {"reward/mean": 0.5}, [], []))
    for step in checkpoints:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
    for name in files:
        (folder / name).write_text("{}")
    return folder


@contextmanager
def another_process(work: Callable[[], object]) -> Iterator[int]:
    """A forked process that has done something and now sleeps; killed at the end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kept = work()  # noqa: F841 -- an object that would release its lock
            os.write(write, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(write)
        assert os.read(read, 1)
        yield child
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every entry below a folder with its inode, its size and the time of its last change."""
    entries = [folder, *folder.rglob("*")]
    status = {str(path): path.lstat() for path in entries}
    return {name: (one.st_ino, one.st_size, one.st_mtime_ns) for name, one in status.items()}


# ---- states ----


def test_states_by_files(tmp_path: Path) -> None:
    assert run_state(make_run(tmp_path / "a", files=("summary.json",))) == "finished"
    assert run_state(make_run(tmp_path / "b", files=("stopped.json",))) == "stopped"
    assert run_state(make_run(tmp_path / "c", checkpoints=(2, 3))) == "stopped"  # of an older version
    assert run_state(make_run(tmp_path / "d", checkpoints=(2,))) == "crashed"
    assert run_state(make_run(tmp_path / "e")) is RunState.CRASHED
    assert run_state(make_run(tmp_path / "f", files=("summary.json", "stopped.json"))) is RunState.FINISHED


def test_a_run_is_running_until_its_process_ends_even_by_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", files=("summary.json",))
    with another_process(lambda: FolderLock(tmp_path / "run")):
        assert run_state(tmp_path / "run") is RunState.RUNNING
        monkeypatch.setattr(module, "_has_open", lambda *_: False)  # without /proc, as on macOS
        assert run_state(tmp_path / "run") is RunState.RUNNING
    assert run_state(tmp_path / "run") is RunState.FINISHED


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is on a file system without locks."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(module.fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_a_process_with_the_number_of_the_last_writer_is_not_taken_for_it(tmp_path: Path) -> None:
    """This process has the number that the lock file names, and even reads the file."""
    make_run(tmp_path / "run")
    assert (tmp_path / "run" / "covey.lock").read_text().split()[0] == str(os.getpid())
    with open(tmp_path / "run" / "covey.lock"):
        assert run_state(tmp_path / "run") is RunState.CRASHED


def test_a_reader_does_not_count_as_a_writer_and_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run")
    reader = open(tmp_path / "run" / "covey.lock")  # noqa: SIM115
    fcntl.flock(reader, fcntl.LOCK_SH)
    assert run_state(tmp_path / "run") is RunState.CRASHED
    with monkeypatch.context() as patch:
        patch.setattr(module, "_READER_SECONDS", 0.0)
        with pytest.raises(ConfigError, match="is being written by"):
            FolderLock(tmp_path / "run")
    monkeypatch.setattr(module.time, "sleep", lambda seconds: reader.close())
    FolderLock(tmp_path / "run").release()


def test_a_writer_is_refused_at_once_while_there_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("waited for a writer"))
    run = make_run(tmp_path / "run")
    with FolderLock(run), pytest.raises(ConfigError, match=f"is being written by process {os.getpid()}"):
        FolderLock(run)


@pytest.mark.usefixtures("without_locks")
def test_a_writer_is_found_on_a_file_system_without_locks(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with another_process(lambda: FolderLock(tmp_path / "run")):
        assert run_state(tmp_path / "run") is RunState.RUNNING
    assert run_state(tmp_path / "run") is RunState.CRASHED


def test_a_run_of_another_machine_is_running_while_its_files_change(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "covey.lock").write_text("1 another-machine\n")
    assert run_state(run) is RunState.RUNNING
    for path in (run, *run.rglob("*")):
        os.utime(path, (1e9, 1e9))
    assert last_change(run) == 1e9
    assert run_state(run) is RunState.CRASHED
    (run / "summary.json").write_text("{}")
    assert run_state(run) is RunState.FINISHED


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"1" * 5000, b"-3 x", b"99999999999999999999999 y"])
def test_a_damaged_lock_file_means_no_writer(content: bytes, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", files=("summary.json",))
    (run / "covey.lock").write_bytes(content)
    assert run_state(run) is RunState.FINISHED


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "missing"])
def test_only_a_plain_lock_file_is_opened(kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", files=("summary.json",))
    (run / "covey.lock").unlink()
    if kind == "link":
        (run / "covey.lock").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_text(f"{os.getpid()} {os.uname().nodename}\n")
    elif kind == "pipe":
        os.mkfifo(run / "covey.lock")
    elif kind == "folder":
        (run / "covey.lock").mkdir()
    assert run_state(run) is RunState.FINISHED


# ---- reading disturbs nothing ----


def test_reading_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", checkpoints=(3,)), make_run(tmp_path / "b"), tmp_path / "missing"]
    (runs[1] / "covey.lock").unlink()
    before = snapshot(tmp_path)
    for run in runs:
        run_state(run)
    find_runs(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_runs_that_start_while_their_state_is_read_all_get_the_lock(tmp_path: Path) -> None:
    """A reader has the lock for a moment."""
    make_run(tmp_path / "run")
    begun = [FolderLock(tmp_path / "run")]
    begun.pop().release()
    ended = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not ended.is_set():
            seen.add(run_state(tmp_path / "run"))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(300):
            FolderLock(tmp_path / "run").release()  # raises if anyone else holds the lock
        with FolderLock(tmp_path / "run"):
            while "running" not in seen:
                pass
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    assert seen <= {"running", "crashed"}


# ---- steps, times and checkpoints ----


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "reward/me')
    assert last_step(run) == 3
    (run / "metrics.jsonl").write_bytes(b"")
    assert last_step(run) == 0
    (run / "metrics.jsonl").write_bytes(b'{"step": true}\n[1]\n"step"\n{"step": -1}\n')
    assert last_step(run) == 0
    (run / "metrics.jsonl").unlink()
    assert last_step(run) == 0


def test_long_lines_at_the_end_of_the_metrics_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    line = b'{"step": %d, "reward/' + b"x" * 100_000 + b'": 1.0}\n'
    (run / "metrics.jsonl").write_bytes(b"".join(line % step for step in range(1, 4)))
    assert last_step(run) == 3


def test_checkpoints_without_a_manifest_links_and_other_names_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoints=(2, 10))
    (run / "checkpoints" / "step-00000004").mkdir()
    (run / "checkpoints" / ".unfinished-00000006").mkdir()
    (run / "checkpoints" / "step-00000008").symlink_to(run / "checkpoints" / "step-00000002")
    assert checkpoint_steps(run) == [2, 10]
    assert checkpoint_steps(tmp_path) == []


# ---- finding runs ----


def test_runs_are_found_at_several_levels_and_not_inside_runs(tmp_path: Path) -> None:
    expected = [make_run(tmp_path / name) for name in ("a", "compare/grpo-seed0", "compare/ppo-seed0", "b")]
    make_run(tmp_path / ".hidden")
    make_run(tmp_path / "a" / "inner")
    make_run(tmp_path / "1/2/3/4/5")
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.toml").write_text("a recipe beside the runs")
    assert find_runs(tmp_path) == sorted(expected)
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert find_runs(str(tmp_path / "compare")) == [tmp_path / "compare" / f"{name}-seed0" for name in ("grpo", "ppo")]
    assert find_runs(tmp_path / "missing") == []


def test_a_run_without_a_step_is_found_while_it_begins(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run"):
        (tmp_path / "run" / "config.toml").write_text("steps = 5\n")
        assert find_runs(tmp_path) == [tmp_path / "run"]
        assert run_state(tmp_path / "run") is RunState.RUNNING
    assert find_runs(tmp_path) == []


def test_links_to_runs_count_once_and_loops_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    outside = make_run(tmp_path / "outside" / "b")
    (tmp_path / "runs" / "again").symlink_to(run)
    (tmp_path / "runs" / "linked").symlink_to(outside)
    (tmp_path / "runs" / "loop").symlink_to(tmp_path)
    (tmp_path / "runs" / "nowhere").symlink_to(tmp_path / "nowhere")
    assert find_runs(tmp_path / "runs") == [run, tmp_path / "runs" / "linked"]


def test_finding_runs_needs_no_torch() -> None:
    code = "import sys, covey.tracking.run_folder; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
