"""How the sandbox is asked for: the arguments of bwrap, its environment, the filter of system calls.

These tests need no bwrap. A backend that does not isolate is not used, so that the tests of hostile programs skip it.
"""

import struct
from typing import Any

import pytest

from covey.llm.rewards.sandbox import backends, supervisor
from covey.llm.rewards.sandbox.session import Limits

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Numbers of the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
REFUSED = {
    "x86_64": {"ptrace": 101, "unshare": 272, "mount": 165, "socket": 41, "memfd_create": 319, "io_uring_setup": 425,
               "bpf": 321, "keyctl": 250, "shmget": 29, "userfaultfd": 323, "flock": 73, "inotify_init1": 294,
               "file_setattr": 469, "sendmsg": 46, "fchmod": 91, "sync": 162, "fadvise64": 221, "connect": 42,
               "prctl": 157, "of the x32 ABI": 0x40000000, "of a later kernel": 600},
    "aarch64": {"ptrace": 117, "unshare": 97, "mount": 40, "socket": 198, "memfd_create": 279, "io_uring_setup": 425,
                "bpf": 280, "keyctl": 219, "shmget": 194, "userfaultfd": 282, "flock": 32, "inotify_init1": 26,
                "file_setattr": 469, "sendmsg": 211, "fchmod": 52, "sync": 81, "fadvise64": 223, "connect": 203,
                "prctl": 167, "of a later kernel": 600},
}  # fmt: skip
NEEDED = {"x86_64": (0, 1, 9, 57, 60, 231), "aarch64": (63, 64, 222, 93, 94)}  # read, write, mmap, (fork,) exit
NULL, POINTER = 0, 0x7FFF_0000_0000  # the lower half of this pointer is 0
# call: numbers of both architectures, and arguments with which it is allowed or refused
WITH_ARGUMENTS = {
    "fcntl": ((72, 25), [(3, 0), (3, 1), (3, 2), (3, 3), (3, 4), (3, 1030), (3, 2 ** 32 + 3)],
              [(3, 1024), (3, 1026), (3, 6), (3, 37), (3, 5), (3, 8), (3, 10), (3, 1031), (3, 1033)]),
    "ioctl": ((16, 29), [(3, 0x5401), (3, 0x541B)],
              [(3, 0x40086602), (3, 0x80086601), (3, 0x5412), (3, 0x401C5820), (3, 0x8008_6601_0000_5402)]),
    "socketpair": ((53, 199), [(1, 1)], [(2, 1), (16, 3)]),
    "sendto": ((44, 206), [(3, POINTER, 1, 0, NULL)], [(3, 1, 1, 0x20000000, POINTER), (3, 1, 1, 0, POINTER + 64)]),
    "prlimit64": ((302, 261), [(0, 7, NULL)], [(9, 7, NULL), (0, 7, POINTER), (0, 7, POINTER + 64)]),
    "madvise": ((28, 233), [(POINTER, 4096, 4)], [(POINTER, 4096, 20), (POINTER, 4096, 21), (POINTER, 4096, 9)]),
    "sched_getaffinity": ((204, 123), [(0,)], [(9,)]),
    # as fork, threads and posix_spawn call it; each new namespace, and a sibling
    "clone": ((56, 220), [(0x01200011,), (0x003D0F00,), (0x00004111,)],
              [(0x20000,), (0x2000000,), (0x4000000,), (0x8000000,), (0x10000000,), (0x20000000,), (0x40000000,),
               (0x80,), (0x8011,)]),
}  # fmt: skip


def decide(program: bytes, number: int, architecture: int, *arguments: int) -> int:
    """Run a classic BPF program as seccomp does; returns its verdict."""
    lines = [struct.unpack_from("<HBBI", program, place) for place in range(0, len(program), 8)]
    data = struct.pack("<iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
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
    program, architecture = backends.bpf_filter(machine), ARCHITECTURES[machine]
    for name, number in REFUSED[machine].items():
        assert decide(program, number, architecture) == EPERM, name
    for number in NEEDED[machine]:
        assert decide(program, number, architecture) == ALLOW
    assert decide(program, 435, architecture) == ENOSYS  # clone3


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_looks_at_the_arguments_of_a_call(machine: str, name: str) -> None:
    program, architecture = backends.bpf_filter(machine), ARCHITECTURES[machine]
    numbers, allowed, refused = WITH_ARGUMENTS[name]
    number = numbers[machine == "aarch64"]
    for arguments in allowed:
        assert decide(program, number, architecture, *arguments) == ALLOW, arguments
    for arguments in refused:
        assert decide(program, number, architecture, *arguments) == EPERM, arguments


def test_the_filter_ends_a_program_of_another_architecture() -> None:
    assert decide(backends.bpf_filter("x86_64"), 0, ARCHITECTURES["aarch64"]) == KILL
    with pytest.raises(NotImplementedError, match="riscv64"):
        backends.bpf_filter("riscv64")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("as_root", [True, False])
def test_bwrap_gets_every_namespace_no_environment_and_a_root_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, as_root: bool
) -> None:
    monkeypatch.setattr(backends.os, "geteuid", lambda: 0 if as_root else 1000)
    monkeypatch.setattr(backends.os, "access", lambda path, mode: True)
    sandbox = backends.bubblewrap("/usr/bin/bwrap")
    command = list(sandbox.command)
    options = command[: command.index("--")]
    assert {"--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--clearenv", "--new-session",
            "--die-with-parent"} <= set(options)  # fmt: skip
    assert command[-1] == backends.bpf_filter().hex()  # the harness passes it on to the kernel
    assert options[options.index("--cap-drop") + 1] == "ALL"
    assert ("--disable-userns" in options and "--unshare-user" in options) is not as_root
    last_mount = max(place for place, word in enumerate(options) if word in ("--ro-bind", "--tmpfs", "--dir"))
    remounted = [place for place, word in enumerate(options) if word == "--remount-ro" and options[place + 1] == "/"]
    assert len(remounted) == 1
    assert remounted[0] > last_mount
    assert not {"--bind", "--dev-bind", "--proc", "--setenv", "--share-net"} & set(options)
    uids = [sandbox.settings(Limits(processes=3))["harness"] for _ in range(2)]
    assert [settings["limits"]["RLIMIT_NPROC"] for settings in uids] == [3 if as_root else 4] * 2
    assert (uids[0]["uid"] != uids[1]["uid"]) is as_root


def test_bwrap_is_started_without_environment_in_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    def record(command: list[str], **options: Any) -> None:
        started.update(options)
        raise OSError("not started in this test")

    monkeypatch.setattr(supervisor, "adopt_orphans", lambda: None)
    monkeypatch.setattr(supervisor.subprocess, "Popen", record)
    program = supervisor.Program({"command": [], "policy": None, "folder": ""}, {"harness": {}})
    with pytest.raises(OSError, match="not started"):
        program({"seconds": 1.0, "most": 1})
    assert started["env"] == {}
    assert started["start_new_session"] is True
