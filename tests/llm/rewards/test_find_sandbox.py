"""Which bwrap is used, and what a user reads if it is absent or does not work."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covey.config import ConfigError, RewardConfig
from covey.llm.rewards.code import CodeRunner
from covey.llm.rewards.sandbox import backends
from covey.llm.rewards.sandbox.backends import find_bwraps, find_sandbox, try_backend
from covey.llm.rewards.sandbox.session import Sandbox
from helpers.sandboxes import backend, is_running, processes_left

NAMESPACE = "bwrap: No permissions to create new namespace"
REFUSES = f"#!/bin/sh\necho '{NAMESPACE}' >&2\nexit 1\n"
SILENT = "#!/bin/sh\nexit 0\n"
OTHER_MACHINE = "\x7fELF of another machine"
HANGS = "#!/bin/sh\necho $$ >> '{log}'\nsleep 1000 & echo $! >> '{log}'\nwait\n"
WITHOUT_ISOLATION = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
NO_INTERPRETER = "#!/no/such/shell\n"
NOT_EXECUTABLE = "not executable"
BROKEN = {
    "refuses": (REFUSES, f"the sandbox (bubblewrap) did not start: {NAMESPACE}"),
    "silent": (SILENT, "the sandbox (bubblewrap) did not start: ended with exit code 0"),
    "other machine": (OTHER_MACHINE, "the sandbox (bubblewrap) did not start: OSError: [Errno 8] Exec format error"),
    "no interpreter": (NO_INTERPRETER, "the sandbox (bubblewrap) did not start: FileNotFoundError: [Errno 2]"),
    "hangs": (HANGS, "the sandbox (bubblewrap) did not start: took longer than 1 s"),
    "isolates nothing": (WITHOUT_ISOLATION, "test program"),
    "not executable": (NOT_EXECUTABLE, "this user may not run it"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Make a program in a folder. PATH is the folders `first` and `second`, the interpreter is in `beside`."""
    folders = [tmp_path / name for name in ("first", "second", "beside", "usual")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("PATH", f"{folders[0]}:{folders[1]}::{tmp_path / 'absent'}")
    (folders[2] / "python").symlink_to(sys.executable)  # which starts the workers
    monkeypatch.setattr(sys, "executable", str(folders[2] / "python"))
    monkeypatch.setattr(backends, "USUAL_FOLDERS", (str(folders[3]),))
    monkeypatch.setattr(backends, "START_SECONDS", 1.0)
    monkeypatch.setitem(sys.modules, "sandlock", None)  # as if it were not installed

    def make(folder: str, text: str) -> Path:
        program = tmp_path / folder / "bwrap"
        program.write_text(text.replace("{log}", str(tmp_path / "log")))
        program.chmod(0o644 if text == NOT_EXECUTABLE else 0o755)
        return program

    find_sandbox.cache_clear()
    yield make
    find_sandbox.cache_clear()


def test_bwrap_is_searched_on_path_beside_the_interpreter_and_in_the_usual_folders(
    place: Callable[[str, str], Path], tmp_path: Path
) -> None:
    assert find_bwraps() == []
    programs = [str(place(folder, REFUSES)) for folder in ("first", "second", "beside", "usual")]
    assert find_bwraps() == programs
    (tmp_path / "second" / "bwrap").unlink()
    (tmp_path / "second" / "bwrap").symlink_to(programs[0])
    assert find_bwraps() == [programs[0], *programs[2:]]  # each file once
    (tmp_path / "first" / "bwrap").unlink()
    (tmp_path / "first" / "bwrap").mkdir()
    assert find_bwraps() == programs[2:]


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN)
def test_without_a_bwrap_that_works_the_reward_names_the_reason_and_what_to_install(
    text: str, reason: str, place: Callable[[str, str], Path], tmp_path: Path
) -> None:
    programs = place("first", text), place("usual", SILENT)
    with pytest.raises(ConfigError) as refused:
        CodeRunner(RewardConfig(name="code"))
    said = str(refused.value)
    assert "\n" not in said
    assert 'install bubblewrap (apt install bubblewrap) or sandlock (pip install "covey[sandbox]")' in said
    assert re.search(f"bubblewrap {programs[0]}: [^;]*{re.escape(reason)}", said)
    assert f"bubblewrap {programs[1]}: {BROKEN['silent'][1]}" in said
    assert "sandlock: the package sandlock is not installed" in said
    assert not processes_left()
    if text == HANGS:
        started = [int(process) for process in (tmp_path / "log").read_text().split()]
        assert len(started) >= 2
        deadline = time.monotonic() + 60
        while any(map(is_running, started)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_running, started))


def test_without_any_bwrap_the_reward_says_so(place: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match="bubblewrap: bwrap is not installed; sandlock: the package sandlock is not"):
        CodeRunner(RewardConfig(name="code"))


@pytest.fixture
def works(request: pytest.FixtureRequest) -> Sandbox:
    """The backend of this name, found before `place` hides it."""
    return backend(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("works", ["bubblewrap"], indirect=True)
def test_programs_that_do_not_work_hide_no_other(
    works: Sandbox, place: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for number, (text, _) in enumerate(BROKEN.values()):
        folders.append(str(tmp_path / f"broken{number}"))
        os.mkdir(folders[-1])
        place(folders[-1], text)
    monkeypatch.setenv("PATH", ":".join(folders))
    real = place("usual", "")
    real.unlink()
    real.symlink_to(works.command[0])
    monkeypatch.setattr(backends, "START_SECONDS", 5.0)
    chosen = try_backend("bubblewrap")
    assert chosen.command[0] == str(real)


@pytest.mark.parametrize("works", ["sandlock"], indirect=True)
def test_a_bwrap_that_does_not_work_hides_no_sandlock(
    works: Sandbox, place: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place("first", SILENT)
    monkeypatch.delitem(sys.modules, "sandlock")
    monkeypatch.setattr(backends, "START_SECONDS", 60.0)
    assert find_sandbox().name == works.name == "sandlock"
