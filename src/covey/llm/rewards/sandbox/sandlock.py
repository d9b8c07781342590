"""The backend sandlock: Landlock and seccomp without namespaces, in the wheel `sandlock` (covey[sandbox]).

Landlock limits neither the metadata of files, nor locks, nor notices of their changes, nor what reaches other processes
of the user, and sandlock's own list of refused calls leaves many of these, so the harness adds the filter of
`seccomp.py`. The supervisor sets the limits of resources beforehand.

sandlock supervises the program from a process of its own (`sandlock_process.py`), so that the run's process is not
forked. Without a process namespace, that supervisor adopts orphans and ends all of its descendants, at the latest when
the run's process ends: it notices that by the end of its socket to the run. A supervisor is forked from a launcher that
has imported the package, because Python's start and this import take longer than the sandbox.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from covey.llm.rewards.sandbox.command import harness_command, resource_limits
from covey.llm.rewards.sandbox.interpreter import find_interpreter, site_packages
from covey.llm.rewards.sandbox.limits import NOBODY, Limits
from covey.llm.rewards.sandbox.sandlock_launcher import LAUNCHER, SupervisedProgram
from covey.llm.rewards.sandbox.seccomp import bpf_filter
from covey.llm.rewards.sandbox.session import SandboxFailure

LINKER_CACHE = "/etc/ld.so.cache"  # names of the host's libraries, which the dynamic linker needs to find them


class Sandlock:
    """Implements `Sandbox` with sandlock."""

    name = "sandlock"

    def __init__(self) -> None:
        """Find the package and the interpreter's files.

        Raises:
            SandboxFailure: if the package is not installed.
            NotImplementedError: for an architecture that `seccomp.py` does not know.
        """
        if importlib.util.find_spec("sandlock") is None:
            raise SandboxFailure("the package sandlock is not installed")
        self._filter = bpf_filter()
        self.interpreter = found = find_interpreter()
        readable = [found.executable, found.library, *found.shared_objects, Path(LINKER_CACHE)]
        # The linker's links to libraries are read too, and Landlock checks the file that a link leads to.
        self.policy: dict[str, Any] = {
            "fs_readable": [str(path) for path in readable if path.exists()],
            "fs_denied": [str(path) for path in site_packages(found)],
            "clean_env": True,
        }
        if os.geteuid() == 0:  # in a user namespace root cannot raise its limits again
            self.policy |= {"uid": NOBODY, "gid": NOBODY}

    def launch(self, limits: Limits) -> SupervisedProgram:
        # sandlock counts processes and not threads; RLIMIT_NPROC would count all processes of the user.
        policy = self.policy | {"max_processes": limits.processes, "max_memory": f"{limits.memory_mb}M"}
        harness = harness_command(self.interpreter, None, processes=None, system_calls=self._filter)
        settings = {"policy": policy, "command": harness, "limits": resource_limits(limits)}
        try:
            return LAUNCHER.launch(settings, limits.start_seconds)
        except OSError as error:
            raise SandboxFailure(f"sandlock cannot be started: {error}") from None
