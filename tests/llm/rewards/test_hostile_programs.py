"""Hostile programs: none leaves the sandbox, none forges a verdict, none keeps running."""

import contextlib
import ctypes
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.llm.rewards.code import CallCase, CallTests, CheckTests, Judge, StdinCase, StdinTests
from covey.llm.rewards.sandbox.backends import ALLOWED, CHECKED, no_sandbox
from covey.llm.rewards.sandbox.session import Limits, ProgramFault, Sandbox, Session
from helpers.hostile_programs import ESCAPES, EXHAUSTING, FORGERIES, TRY
from helpers.sandboxes import BACKENDS, any_backend, backend, processes_left

# Numbers of the calls that the filter knows, clone, clone3, and uretprobe and uprobe, which the kernel hides from it.
_ARM = platform.machine() == "aarch64"
_KNOWN = [
    *ALLOWED.values(),
    *(numbers for numbers, _ in CHECKED.values()),
    (56, 220),
    (435, 435),
    (335, None),
    (336, None),
]
UNLISTED = sorted({*range(600)} - {numbers[_ARM] for numbers in _KNOWN})
LIMITS = Limits(seconds=20.0, cpu_seconds=20)
SHORT = Limits(seconds=1.0, cpu_seconds=3, memory_mb=128)
SECRET = 7_481_052_963_318_204
# In a sandbox without a process namespace a mistake here would end every process of this machine.
ONLY_WITH_NAMESPACES = {"signals_everyone"}
BOTH = [*ESCAPES, *EXHAUSTING, *FORGERIES]


@pytest.fixture(params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    yield backend(request.param)
    assert processes_left() == []


def test_there_are_at_least_forty_programs_with_different_names() -> None:
    assert len(set(BOTH)) == len(BOTH) >= 40


@contextlib.contextmanager
def shared_memory(content: bytes) -> Iterator[int]:
    """A System V segment of this machine that everyone may read; yields its id."""
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 4096, 0o1666)
    address = libc.shmat(segment, None, 0)
    try:
        ctypes.memmove(address, content, len(content))
        yield segment
    finally:
        libc.shmdt(ctypes.c_void_p(address))
        libc.shmctl(segment, 0, None)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ESCAPES)
def test_a_program_reaches_nothing_outside(
    name: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sandbox.name == "sandlock" and name in ONLY_WITH_NAMESPACES:
        pytest.skip("needs a process namespace")
    monkeypatch.setenv("COVEY_TEST_TOKEN", "secret of the run")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o755)  # the last one is the folder of everyone's temporary files
    canary = tmp_path / "expected.txt"
    canary.write_text("secret of the host")
    unix = Path("/tmp", f"covey_{os.getpid()}_{secrets.token_hex(4)}")  # paths of such sockets are short
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX) as abstract,
        shared_memory(b"secret of the host") as segment,
        Session(sandbox, LIMITS) as session,
    ):
        local.bind(str(unix))
        local.listen()
        unix.chmod(0o777)
        abstract.bind(f"\0{unix.name}")
        abstract.listen()
        places = f"CANARY, UNIX, ABSTRACT = {str(canary)!r}, {str(unix)!r}, {abstract.getsockname()!r}"
        numbers = f"PORT, PARENT, SEGMENT, UNLISTED = {(server.getsockname()[1], os.getpid(), segment, UNLISTED)}"
        try:
            printed = session.run_script(f"{TRY}\n{places}\n{numbers}\n{ESCAPES[name]}\nprint('done')", b"", 1 << 20)
            assert b"done" in printed
        except ProgramFault as fault:  # ended for the attempt; a mistake of the program itself is no such end
            printed = fault.printed
            assert "was killed" in str(fault) or "PermissionError" in str(fault), fault  # noqa: PT017
    unix.unlink()
    assert b"LEAK" not in printed, printed.decode("utf-8", "replace")
    assert canary.read_text() == "secret of the host"


@pytest.mark.sampled(27)
@pytest.mark.parametrize("name", EXHAUSTING)
def test_a_program_that_takes_too_much_is_ended(name: str, sandbox: Sandbox) -> None:
    began = time.monotonic()
    verdict = Judge(sandbox, SHORT).judge(EXHAUSTING[name], StdinTests([StdinCase("", "42")]))
    assert not verdict.is_right
    assert verdict.text != "passed"
    assert time.monotonic() - began < 60


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_program_forges_no_verdict(name: str) -> None:
    """The parent decides on verdicts, in the same way for every sandbox."""
    assert_forges_nothing(name, any_backend())
    assert processes_left() == []


@pytest.mark.slow
def test_no_program_forges_a_verdict_in_any_sandbox(sandbox: Sandbox) -> None:
    for name in FORGERIES:
        assert_forges_nothing(name, sandbox)


def assert_forges_nothing(name: str, sandbox: Sandbox) -> None:
    judge = Judge(sandbox, SHORT)
    program = FORGERIES[name]
    verdict = judge.judge(program, CallTests("solve", [CallCase([3], SECRET), CallCase([SECRET // 3], SECRET)]))
    assert (verdict.passed, verdict.total) == (0, 2)
    source = f"def check(candidate):\n    assert candidate(3) == {SECRET}\n    assert candidate(4) == {SECRET + 1}\n"
    assert not judge.judge(program, CheckTests(source, "solve", ("solve",))).is_right
    printed = judge.judge(f"{program}\nprint(solve(3))", StdinTests([StdinCase("3\n", str(SECRET))]))
    assert not printed.is_right


def test_the_programs_would_pass_if_they_were_right(sandbox: Sandbox) -> None:
    """The forgeries fail because of what they are, not because nothing passes."""
    judge = Judge(sandbox, LIMITS)
    program = f"def solve(x):\n    return {SECRET} + (x == 4)"
    tests = CallTests("solve", [CallCase([3], SECRET), CallCase([4], SECRET + 1)])
    assert judge.judge(program, tests).is_right
    source = f"def check(candidate):\n    assert candidate(3) == {SECRET}\n    assert candidate(4) == {SECRET + 1}\n"
    assert judge.judge(program, CheckTests(source, "solve", ("solve",))).is_right
    stdin = StdinTests([StdinCase("3\n", str(SECRET))])
    assert judge.judge(f"{program}\nprint(solve(int(input())))", stdin).is_right


def test_an_attempt_that_succeeds_is_noticed(tmp_path: Path) -> None:
    """Without a sandbox the programs do reach the canary, so the tests above can fail."""
    canary = tmp_path / "expected.txt"
    canary.write_text("secret of the host")
    with Session(no_sandbox(), LIMITS) as session:
        source = f"{TRY}\nCANARY = {str(canary)!r}\n{ESCAPES['reads_the_hidden_file']}"
        assert b"LEAK" in session.run_script(source, b"", 1 << 20)


def test_a_program_that_forks_is_held_to_its_number_of_processes() -> None:
    sandbox = any_backend()
    source = (
        "import os, time\ncount = 1\nfor _ in range(50):\n    try:\n        if not os.fork(): time.sleep(100)\n"
        "        count += 1\n    except OSError:\n        break\nprint(count, flush=True)\nos._exit(0)"
    )
    for processes in (1, 3, 6):
        with Session(sandbox, Limits(seconds=30, cpu_seconds=30, processes=processes)) as session:
            assert int(session.run_script(source, b"", 1000)) == processes
    assert processes_left() == []
