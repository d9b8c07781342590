"""Run folders: one process writes into one at a time, and nothing else that lies in a folder is ever replaced."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from covey.config import ConfigError, MachineError
from covey.tracking.run_folder import FolderLock, check_run_dir, claim_run_dir, holds_run, next_run_dir, write_folders
from covey.tracking.run_store import RunStore, read_metrics
from helpers.run_helpers import files
from helpers.step_records import step_record


def begin(run_dir: Path) -> None:
    """A run that has made a step."""
    with RunStore(run_dir) as store:
        (run_dir / "config.toml").write_text("steps = 3\n")
        store.record(step_record(1))


def in_fork(work: Callable[[], None], wait: bool = True) -> int:
    """Do something in a forked child; returns its exit code (1: an exception), or with `wait=False` its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if wait else child


# ---- the lock ----


def test_a_second_process_is_refused_with_the_first_one_s_name(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    with RunStore(tmp_path / "run", resume=True):
        for resume in (True, False):
            expected = f"is being written by process {os.getpid()}: wait" if resume else "already holds a run"
            with pytest.raises(ConfigError, match=expected):
                check_run_dir(tmp_path / "run", resume=resume)
        assert in_fork(lambda: RunStore(tmp_path / "run", resume=True).close()) == 1
        with pytest.raises(ConfigError, match="is being written by process"):
            RunStore(tmp_path / "run", resume=True)  # the same process counts too
    assert in_fork(lambda: RunStore(tmp_path / "run", resume=True).close()) == 0


def test_a_folder_is_locked_before_the_first_step(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run"), pytest.raises(ConfigError, match=f"being written by process {os.getpid()}"):
        RunStore(tmp_path / "run")


def test_what_a_kill_leaves_before_the_first_step_is_no_obstacle(tmp_path: Path) -> None:
    """The same command again goes on: a run that was killed while it wrote its first folders kept nothing."""
    for name in (".unfinished-new", ".unfinished-old"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "config.json").write_text("{")
    (tmp_path / "run" / "covey.lock").write_text("")
    with RunStore(tmp_path / "run") as store:
        write_folders(store.run_dir, lambda folder: (folder / "architecture").mkdir())
    assert not list((tmp_path / "run").glob(".unfinished-*"))


def test_the_lock_ends_with_its_process_by_kill(tmp_path: Path) -> None:
    read, write = os.pipe()

    def hold() -> None:
        lock = FolderLock(tmp_path)
        os.write(write, b"x")
        signal.pause()
        lock.release()

    child = in_fork(hold, wait=False)
    os.read(read, 1)
    with pytest.raises(ConfigError, match=rf"is being written by process {child}\b"):
        FolderLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    FolderLock(tmp_path).release()


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    """Neither a fork nor a program that inherits descriptors, such as a reward's process, holds it beyond the run."""
    lock = FolderLock(tmp_path)
    ends = [os.pipe() for _ in range(2)]
    forked = in_fork(lambda: bool(os.write(ends[0][1], b"x")) and signal.pause(), wait=False)
    os.read(ends[0][0], 1)
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    worker = multiprocessing.get_context("fork").Process(target=signal.pause)
    worker.start()
    lock.release()
    try:
        FolderLock(tmp_path).release()
    finally:
        for pid in (forked, worker.pid):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(forked, 0)
        worker.join()
        program.communicate(b"\n")


def test_a_child_that_releases_its_copy_does_not_unlock(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        assert in_fork(lambda: lock.release()) == 0
        assert in_fork(lambda: FolderLock(tmp_path).release()) == 1


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "covey.lock").symlink_to(target)
    with pytest.raises((ConfigError, MachineError), match=r"covey\.lock"):
        RunStore(tmp_path / "run")
    assert target.read_text() == "precious"


def test_a_folder_that_is_deleted_moved_or_replaced_is_found_before_the_next_write(tmp_path: Path) -> None:
    for change in ("deleted", "moved", "replaced"):
        run_dir = tmp_path / change
        begin(run_dir)
        with RunStore(run_dir, resume=True) as store:
            run_dir.rename(tmp_path / f"{change} away")
            if change == "replaced":
                begin(run_dir)
            before = files(run_dir)
            for write in (lambda: store.record(step_record(2)), store.sync):
                with pytest.raises(MachineError, match=re.escape(f"{run_dir} was deleted or moved")):
                    write()
            assert files(run_dir) == before


# ---- numbered folders ----


def test_run_folders_are_numbered(tmp_path: Path) -> None:
    assert next_run_dir("grpo", tmp_path / "runs") == tmp_path / "runs" / "grpo-001"
    for name in ("grpo-001", "grpo-009", "grpo-x", "other-050", "grpo-2-077"):
        (tmp_path / name).mkdir()
    assert next_run_dir("grpo", tmp_path) == tmp_path / "grpo-010"


@pytest.mark.slow
def test_of_many_that_start_at_once_each_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    def claim() -> None:
        os.read(gate[0], 1)
        for _ in range(5):
            (claim_run_dir("grpo", tmp_path / "runs") / str(os.getpid())).touch()

    gate = os.pipe()
    children = [in_fork(claim, wait=False) for _ in range(8)]
    os.write(gate[1], b"x" * 8)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == [f"grpo-{number:03d}" for number in range(1, 41)]
    assert all(len(list(folder.iterdir())) == 1 for folder in folders)


@pytest.mark.parametrize("kind", ["file", "dangling", "cyclic"])
def test_a_place_for_runs_that_is_no_folder_is_one_line(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    if kind == "file":
        root.write_text("")
    else:
        root.symlink_to(root if kind == "cyclic" else tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot write the run folder"):
        claim_run_dir("grpo", root)


# ---- folders that a run may not use ----


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    with pytest.raises(ConfigError, match="covey train --resume"):
        RunStore(tmp_path / "run")
    assert len(read_metrics(tmp_path / "run")) == 1
    RunStore(tmp_path / "run", resume=True).close()


def test_a_folder_whose_run_never_made_a_step_is_free(tmp_path: Path) -> None:
    """One that was killed leaves its first files behind; one that ended by itself leaves nothing."""

    def die() -> None:
        RunStore(tmp_path / "run")
        (tmp_path / "run" / "config.toml").write_text("steps = 1\n")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(die) == -signal.SIGKILL
    assert not holds_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"no run to resume in .*: no step is recorded there"):
        RunStore(tmp_path / "run", resume=True)
    RunStore(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"no run to resume in .*: there is no such folder"):
        RunStore(tmp_path / "run", resume=True)


OWNED = {
    "their recipe": {"config.toml": "steps = 5\n"},
    "their base model": {"model/config.json": "{}", "model/model.safetensors": "x"},
    "a model folder": {"config.json": "{}", "model.safetensors": "x"},
    "their summary": {"summary.json": "{}"},
    "their metrics": {"metrics.jsonl": '{"step": 1}\n'},
    "their checkpoints": {"checkpoints/mine.pt": "x"},
    "rollouts": {"rollouts/step_000001.jsonl": "{}\n"},
    "a hidden file": {".git/config": "x"},
    "data": {"prompts.jsonl": '{"prompt": "x"}\n'},
    "a comparison": {"settings.json": "{}", "covey.lock": "1 x\n"},
    "something beside a run that never began": {"covey.lock": "1 x\n", "config.toml": "", "notes.txt": "mine"},
}


@pytest.mark.parametrize("name", OWNED)
@pytest.mark.parametrize("through", ["itself", "link", "link to a link"])
def test_a_folder_that_holds_something_else_is_refused_and_untouched(name: str, through: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    for file, text in OWNED[name].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    run_dir = folder
    for number in range(["itself", "link", "link to a link"].index(through)):
        (tmp_path / f"link{number}").symlink_to(run_dir)
        run_dir = tmp_path / f"link{number}"
    before = files(folder)
    for use in (check_run_dir, RunStore):
        with pytest.raises(ConfigError, match="is not empty and holds no run of covey") as caught:
            use(run_dir)
        assert "--run-dir" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert files(folder) == before


def test_the_home_folder_is_refused_even_if_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path.parent / "link home").symlink_to(tmp_path)
    for home in ("~", tmp_path, tmp_path.parent / "link home"):
        with pytest.raises(ConfigError, match="is your home folder"):
            check_run_dir(home)


def test_links_that_lead_nowhere_files_and_impossible_names_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "cycle").symlink_to(tmp_path / "other cycle")
    (tmp_path / "other cycle").symlink_to(tmp_path / "cycle")
    (tmp_path / "to the file").symlink_to(tmp_path / "file")
    names = [
        "file", "file/run", "dangling", "dangling/run", "cycle", "cycle/run", "to the file", "to the file/run",
        "x" * 300, "y/" * 3000, "nul\0byte",
    ]  # fmt: skip
    for run_dir in [*(tmp_path / name for name in names), Path("/proc/covey"), Path("~no_such_user_of_covey/run")]:
        for use in (check_run_dir, RunStore):
            with pytest.raises(ConfigError) as caught:
                use(run_dir)
            assert re.search("--run-dir|^run_dir: ", str(caught.value)), run_dir
            assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["file", "dangling", "cycle", "other cycle", "to the file"]
    )
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_and_a_link_to_one_are_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    begin(tmp_path / "link")
    assert holds_run(tmp_path / "empty")


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_run_dir(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
