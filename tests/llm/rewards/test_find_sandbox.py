"""Which bwrap is used, and what a user reads if it is absent or does not work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covey.config import ConfigError
from covey.llm.rewards.code import CodeOptions, CodeRunner
from covey.llm.rewards.sandbox.backends import find_sandbox
from covey.llm.rewards.sandbox.bubblewrap import Bubblewrap, find_bwrap
from helpers.sandboxes import processes_left

NAMESPACE = "bwrap: No permissions to create new namespace"
REFUSES = f"#!/bin/sh\necho '{NAMESPACE}' >&2\nexit 1\n"
SILENT = "#!/bin/sh\nexit 0\n"
OTHER_MACHINE = "\x7fELF of another machine"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Make a program in a folder. PATH is the folders `first` and `second`, the interpreter is in `beside`."""
    folders = [tmp_path / name for name in ("first", "second", "beside")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("PATH", f"{folders[0]}:{folders[1]}")
    (folders[2] / "python").symlink_to(sys.executable)  # which starts the watchdog
    monkeypatch.setattr(sys, "executable", str(folders[2] / "python"))
    monkeypatch.setitem(sys.modules, "sandlock", None)  # as if it were not installed

    def make(folder: str, text: str) -> Path:
        program = tmp_path / folder / "bwrap"
        program.write_text(text)
        program.chmod(0o755)
        return program

    for found in (find_bwrap, find_sandbox):
        found.cache_clear()
    yield make
    for found in (find_bwrap, find_sandbox):
        found.cache_clear()


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["first", "second", "beside"], "first"),
        (["second", "beside"], "second"),
        (["beside"], "beside"),  # of the wheel, in an environment that is not activated
    ],
)
def test_bwrap_is_searched_on_path_and_then_beside_the_interpreter(
    there: list[str], chosen: str, place: Callable[[str, str], Path]
) -> None:
    programs = {folder: place(folder, REFUSES) for folder in there}
    assert find_bwrap() == str(programs[chosen])
    assert Bubblewrap().base[0] == str(programs[chosen])


def test_a_file_that_cannot_be_run_is_not_bwrap(place: Callable[[str, str], Path]) -> None:
    place("first", REFUSES).chmod(0o644)
    assert find_bwrap() is None
    second = place("second", REFUSES)
    find_bwrap.cache_clear()
    assert find_bwrap() == str(second)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "bubblewrap: bwrap is not installed"),
        (REFUSES, f"bubblewrap: the sandbox (bubblewrap) did not start: {NAMESPACE}"),
        (SILENT, "bubblewrap: the sandbox (bubblewrap) did not start: ended with exit code 0"),
        (OTHER_MACHINE, "bubblewrap: bwrap cannot be started: [Errno 8] Exec format error"),
    ],
    ids=["absent", "refuses", "silent", "other machine"],
)
def test_without_a_bwrap_that_works_the_reward_names_the_reason_and_what_to_install(
    text: str, reason: str, place: Callable[[str, str], Path]
) -> None:
    if text:
        place("first", text)
    with pytest.raises(ConfigError) as refused:
        CodeRunner(CodeOptions())
    said = str(refused.value)
    assert "\n" not in said
    assert 'install bubblewrap (apt install bubblewrap) or sandlock (pip install "covey[sandbox]")' in said
    assert reason in said
    assert "sandlock: the package sandlock is not installed" in said
    assert not processes_left()
