"""No isolation: the harness as a plain process with resource limits, for `unsafe_without_sandbox` alone.

A program can read and change everything that the user of the run can, use the network, and leave processes behind that
changed their session. There is no other protection than the limits of `harness.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass

from covey.llm.rewards.sandbox.command import harness_command
from covey.llm.rewards.sandbox.interpreter import find_interpreter
from covey.llm.rewards.sandbox.limits import Limits
from covey.llm.rewards.sandbox.session import SandboxFailure


class LocalProcess:
    """Implements `Sandbox` without a sandbox."""

    name = "none"

    def launch(self, limits: Limits) -> LaunchedLocally:
        folder = tempfile.TemporaryDirectory(prefix="covey_program_", ignore_cleanup_errors=True)
        try:
            process = subprocess.Popen(
                harness_command(find_interpreter(), limits, processes=None),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
                cwd=folder.name,
                start_new_session=True,
            )
        except OSError as error:
            folder.cleanup()
            raise SandboxFailure(f"the interpreter cannot be started: {error}") from None
        return LaunchedLocally(process, folder)


@dataclass
class LaunchedLocally:
    """A started interpreter, with its working folder."""

    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]

    def end_descriptor(self) -> int:
        return os.pidfd_open(self.process.pid)

    def kill_all(self) -> None:
        """Kill the process group, and remove the folder."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()
