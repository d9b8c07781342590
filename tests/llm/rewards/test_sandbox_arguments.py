"""How the sandbox is asked for: the arguments of bwrap, its environment, the filter of system calls.

These tests need no bwrap. A backend that does not isolate is not used, so that the tests of hostile programs skip it.
"""

from __future__ import annotations

import struct
import subprocess
from typing import Any

import pytest

from covey.llm.rewards.sandbox import bubblewrap, seccomp
from covey.llm.rewards.sandbox.bubblewrap import Bubblewrap
from covey.llm.rewards.sandbox.limits import Limits
from covey.llm.rewards.sandbox.session import SandboxFailure

BWRAP = "/usr/bin/bwrap"
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
# Numbers of the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
REFUSED = {
    "x86_64": {"ptrace": 101, "unshare": 272, "mount": 165, "socket": 41, "memfd_create": 319, "io_uring_setup": 425,
               "bpf": 321, "keyctl": 250, "shmget": 29, "userfaultfd": 323},
    "aarch64": {"ptrace": 117, "unshare": 97, "mount": 40, "socket": 198, "memfd_create": 279, "io_uring_setup": 425,
                "bpf": 280, "keyctl": 219, "shmget": 194, "userfaultfd": 282},
}  # fmt: skip
NEEDED = {"x86_64": (0, 1, 9, 57, 60, 231), "aarch64": (63, 64, 222, 93, 94)}  # read, write, mmap, (fork,) exit


def decide(program: bytes, number: int, architecture: int, first_argument: int = 0) -> int:
    """Run a classic BPF program as seccomp does; returns its verdict."""
    lines = [struct.unpack_from("<HBBI", program, place) for place in range(0, len(program), 8)]
    data = struct.pack("<iIQQ", number, architecture, 0, first_argument)
    place = accumulator = 0
    while True:
        code, yes, no, operand = lines[place]
        place += 1
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:  # return
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            place += yes if holds[code] else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_refuses_calls_around_the_limits_and_allows_what_python_needs(machine: str) -> None:
    program, architecture = seccomp.bpf_filter(machine), ARCHITECTURES[machine]
    for name, number in REFUSED[machine].items():
        assert decide(program, number, architecture) == EPERM, name
    for number in NEEDED[machine]:
        assert decide(program, number, architecture) == ALLOW
    assert decide(program, 435, architecture) == ENOSYS  # clone3
    assert decide(program, CLONE[machine], architecture, first_argument=0x01200011) == ALLOW  # as fork calls it
    for namespace in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, CLONE[machine], architecture, first_argument=namespace) == EPERM


def test_the_filter_ends_a_program_of_another_architecture() -> None:
    assert decide(seccomp.bpf_filter("x86_64"), 0, ARCHITECTURES["aarch64"]) == KILL
    assert decide(seccomp.bpf_filter("x86_64"), 0x40000000 + 41, ARCHITECTURES["x86_64"]) == KILL  # the x32 ABI
    with pytest.raises(NotImplementedError, match="riscv64"):
        seccomp.bpf_filter("riscv64")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The command and the options with which bwrap is started."""
    found: dict[str, Any] = {}

    start = subprocess.Popen

    def record(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if command[0] != BWRAP:  # the interpreter's files, the watchdog
            return start(command, **options)
        found.update(options, command=command)
        raise OSError("not started in this test")

    monkeypatch.setattr(bubblewrap.os, "access", lambda path, mode: True)
    monkeypatch.setattr(bubblewrap.subprocess, "Popen", record)
    return found


@pytest.mark.parametrize("as_root", [True, False])
def test_bwrap_gets_every_namespace_no_environment_and_a_root_that_cannot_be_written(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, as_root: bool
) -> None:
    monkeypatch.setattr(bubblewrap.os, "geteuid", lambda: 0 if as_root else 1000)
    with pytest.raises(SandboxFailure, match="it cannot be started: not started in this test"):
        Bubblewrap(BWRAP).launch(Limits(seconds=1.0, cpu_seconds=1))
    command = started["command"]
    options = command[: command.index("--")]
    assert {"--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--clearenv", "--new-session",
            "--die-with-parent", "--seccomp"} <= set(options)  # fmt: skip
    assert options[options.index("--cap-drop") + 1] == "ALL"
    assert ("--disable-userns" in options and "--unshare-user" in options) is not as_root
    last_mount = max(place for place, word in enumerate(options) if word in ("--ro-bind", "--tmpfs", "--dir"))
    remounted = [place for place, word in enumerate(options) if word == "--remount-ro" and options[place + 1] == "/"]
    assert len(remounted) == 1
    assert remounted[0] > last_mount
    assert not {"--bind", "--dev-bind", "--proc", "--setenv", "--share-net"} & set(options)
    assert started["env"] == {}
    assert started["start_new_session"] is True
