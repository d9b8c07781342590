"""The backend sandlock: Landlock and seccomp without namespaces, in the wheel `sandlock` (covey[sandbox]).

sandlock supervises the program from a process of its own (`sandlock_process.py`), so that the run's process is not
forked. Without a process namespace, that supervisor adopts orphans and ends all of its descendants, at the latest when
the run's process ends: it notices that by the end of its lifeline, a pipe.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.llm.rewards import worker
from covey.llm.rewards.sandbox import sandlock_process
from covey.llm.rewards.sandbox.command import harness_command, resource_limits
from covey.llm.rewards.sandbox.interpreter import find_interpreter, site_packages
from covey.llm.rewards.sandbox.limits import NOBODY, Limits
from covey.llm.rewards.sandbox.session import SandboxFailure

# Landlock limits neither the metadata of files nor what reaches other processes of the user; sandlock's own list leaves
# these calls too. `prlimit64` also sets a program's own limits, so the supervisor sets them beforehand.
REFUSED = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat", "utime", "utimes", "utimensat",
    "futimesat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr",
    "prlimit64", "setrlimit", "setpriority", "ioprio_set", "sched_setaffinity", "sched_setscheduler", "sched_setparam",
    "sched_setattr", "memfd_create", "memfd_secret", "shmget", "semget", "msgget", "mq_open",
)  # fmt: skip
LINKER_CACHE = "/etc/ld.so.cache"  # names of the host's libraries, which the dynamic linker needs to find them


class Sandlock:
    """Implements `Sandbox` with sandlock."""

    name = "sandlock"

    def __init__(self) -> None:
        """Find the package and the interpreter's files.

        Raises:
            SandboxFailure: if the package is not installed.
        """
        if importlib.util.find_spec("sandlock") is None:
            raise SandboxFailure("the package sandlock is not installed")
        self.interpreter = found = find_interpreter()
        readable = [found.executable, found.library, *found.shared_objects, Path(LINKER_CACHE)]
        # The linker's links to libraries are read too, and Landlock checks the file that a link leads to.
        self.policy: dict[str, Any] = {
            "fs_readable": [str(path) for path in readable if path.exists()],
            "fs_denied": [str(path) for path in site_packages(found)],
            "clean_env": True,
            "extra_deny_syscalls": list(REFUSED),
        }
        if os.geteuid() == 0:  # in a user namespace root cannot raise its limits again
            self.policy |= {"uid": NOBODY, "gid": NOBODY}

    def launch(self, limits: Limits) -> LaunchedSandlock:
        # sandlock counts processes and not threads; RLIMIT_NPROC would count all processes of the user.
        policy = self.policy | {"max_processes": limits.processes, "max_memory": f"{limits.memory_mb}M"}
        harness = harness_command(self.interpreter, None, processes=None)
        settings = json.dumps({"policy": policy, "command": harness, "limits": resource_limits(limits)})
        python = [sys.executable, "-I", "-W", "ignore"]  # of a package that finds no use for its own field gid
        lifeline_read, lifeline = os.pipe()
        try:
            process = subprocess.Popen(
                [*python, sandlock_process.__file__, worker.__file__, str(lifeline_read), settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
                pass_fds=(lifeline_read,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(lifeline)
            raise SandboxFailure(f"sandlock cannot be started: {error}") from None
        finally:
            os.close(lifeline_read)
        return LaunchedSandlock(process, lifeline)


@dataclass
class LaunchedSandlock:
    """A started supervisor."""

    process: subprocess.Popen[bytes]
    lifeline: int

    def kill_all(self) -> None:
        """End the supervisor, which ends its descendants first."""
        os.close(self.lifeline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * worker.END_SECONDS)
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
            raise SandboxFailure("the supervisor of a program could not be ended")
