"""A seccomp filter for sandboxed programs, as classic BPF: the system calls that a Python program needs, and no other.

Files can be read; nothing can be locked, watched, leased or given other attributes, because such a call reaches other
programs through the files of the interpreter. There are pairs of connected sockets, which asyncio needs, and no other
sockets. A call that is not in the list, or has other arguments, fails with EPERM; `clone3` fails with ENOSYS, so that
the C library uses `clone`, whose flags can be tested here.

Source: seccomp(2), linux/bpf_common.h; numbers of system calls from the kernel's tables.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping

Numbers = tuple[int | None, int | None]  # of x86_64 and aarch64; None if the architecture has no such call

ALLOWED: dict[str, Numbers] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "lseek": (8, 62),
    "open": (2, None), "openat": (257, 56), "close": (3, 57), "close_range": (436, 436),
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "access": (21, None),
    "faccessat": (269, 48), "getdents64": (217, 61), "getcwd": (79, 17),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "recvfrom": (45, 207), "getsockname": (51, 204),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "brk": (12, 214),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "exit": (60, 93), "exit_group": (231, 94),
    "wait4": (61, 260), "waitid": (247, 95), "kill": (62, 129), "tgkill": (234, 131), "setsid": (112, 157),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "pause": (34, None),
    "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102),
    "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293),
    "arch_prctl": (158, None), "restart_syscall": (219, 128), "sched_yield": (24, 124),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, None), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165), "sysinfo": (99, 179),
    "uname": (63, 160), "getrandom": (318, 278),
}  # fmt: skip
# name: its numbers, and what each tested half of an argument may be. Argument n has the halves 2n and, above, 2n + 1.
CHECKED: dict[str, tuple[Numbers, Mapping[int, tuple[int, ...]]]] = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: no locks, leases or notices
    "fcntl": ((72, 25), {2: (0, 1, 2, 3, 4, 1030)}),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": ((16, 29), {2: (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)}),
    # MADV_DONTNEED, MADV_FREE, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE: nothing that moves files out of the memory
    "madvise": ((28, 233), {4: (4, 8, 102, 103)}),
    "prlimit64": ((302, 261), {0: (0,), 4: (0,), 5: (0,)}),  # reads a limit of the program itself
    "sched_getaffinity": ((204, 123), {0: (0,)}),
    "socketpair": ((53, 199), {0: (1,)}),  # AF_UNIX
    "sendto": ((44, 206), {8: (0,), 9: (0,)}),  # without an address
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
# Of clone: the signal, CLONE_VM, _FS, _FILES, _SIGHAND, _VFORK, _THREAD, _SYSVSEM, _SETTLS, _PARENT_SETTID,
# _CHILD_CLEARTID, _DETACHED, _CHILD_SETTID. No namespaces, and no siblings of the program.
_CLONE_FLAGS = 0x017D4FFF & ~0x80  # 0x80 is CLONE_NEWTIME
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data, of a little-endian machine
_LOAD, _RETURN, _IF_EQUAL, _IF_ANY_BIT = 0x20, 0x06, 0x15, 0x45
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


def bpf_filter(machine: str | None = None) -> bytes:
    """The filter program, an array of `struct sock_filter`.

    Args:
        machine: architecture; None is the present one.

    Raises:
        NotImplementedError: for an architecture whose numbers of system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _COLUMN:
        raise NotImplementedError(f"no seccomp filter for the architecture {machine}")
    column = _COLUMN[machine]
    allow, refuse = _line(_RETURN, _ALLOW), _line(_RETURN, _ERRNO | _EPERM)
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_IF_EQUAL, _AUDIT_ARCHITECTURES[machine], yes=1, no=0),
        _line(_RETURN, _KILL_PROCESS),
        _line(_LOAD, _NUMBER),
    ]
    flags = [_line(_LOAD, _ARGUMENTS), _line(_IF_ANY_BIT, ~_CLONE_FLAGS & 0xFFFFFFFF, yes=0, no=1), refuse, allow]
    rules = [
        *((numbers, [allow]) for numbers in ALLOWED.values()),
        *((numbers, [*_tests(halves, refuse), allow]) for numbers, halves in CHECKED.values()),
        (_CLONE, flags),
        (_CLONE3, [_line(_RETURN, _ERRNO | _ENOSYS)]),
    ]
    for numbers, rule in rules:
        number = numbers[column]
        if number is not None:
            lines += [_line(_IF_EQUAL, number, yes=0, no=len(rule)), *rule]
    return b"".join([*lines, refuse])


def _tests(halves: Mapping[int, tuple[int, ...]], refuse: bytes) -> list[bytes]:
    """Lines that refuse the call unless each half of an argument has one of its values."""
    lines = []
    for half, values in halves.items():
        lines.append(_line(_LOAD, _ARGUMENTS + 4 * half))
        lines += [_line(_IF_EQUAL, value, yes=len(values) - place) for place, value in enumerate(values)]
        lines.append(refuse)
    return lines


def _line(code: int, operand: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` are the instructions that a test skips."""
    return struct.pack("<HBBI", code, yes, no, operand)
