"""A seccomp filter for sandboxed programs, as classic BPF.

It refuses system calls that a Python program does not need and that reach around the other limits: tracing, namespaces,
mounts, sockets, memory that RLIMIT_AS does not count (memfd, System V shared memory), keys, BPF, io_uring. A refused
call fails with EPERM. `clone3` fails with ENOSYS, so that the C library uses `clone`, whose flags can be tested here.

Source: seccomp(2), linux/bpf_common.h; numbers of system calls from the kernel's tables.
"""

from __future__ import annotations

import platform
import struct

# name: (x86_64, aarch64); None if the architecture has no such call
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "quotactl": (179, 60),
    "socket": (41, 198),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "vmsplice": (278, 75),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "syslog": (103, 116), "personality": (135, 92), "lookup_dcookie": (212, 18),
    "clock_settime": (227, 112), "settimeofday": (164, 170), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_X32_BIT = 0x40000000  # set in the numbers of the x32 ABI, which would go around the list
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, of a little-endian machine
_LOAD, _RETURN, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
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
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_IF_EQUAL, _AUDIT_ARCHITECTURES[machine], yes=1, no=0),
        _line(_RETURN, _KILL_PROCESS),
        _line(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [_line(_IF_AT_LEAST, _X32_BIT, yes=0, no=1), _line(_RETURN, _KILL_PROCESS)]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            lines += [_line(_IF_EQUAL, number, yes=0, no=1), _line(_RETURN, _ERRNO | _EPERM)]
    lines += [_line(_IF_EQUAL, _CLONE3[column], yes=0, no=1), _line(_RETURN, _ERRNO | _ENOSYS)]
    lines += [
        _line(_IF_EQUAL, _CLONE[column], yes=0, no=3),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_IF_ANY_BIT, _NEW_NAMESPACES, yes=0, no=1),
        _line(_RETURN, _ERRNO | _EPERM),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, operand: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` are the instructions that a test skips."""
    return struct.pack("<HBBI", code, yes, no, operand)
