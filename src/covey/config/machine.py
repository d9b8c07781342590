"""Processors, memory and ranks of the machine, how its threads wait, and what exceeds them, without importing torch."""

import os
import sys
from pathlib import Path

from covey.config.common import ConfigError

# What the field `device` takes: a CPU, an NVIDIA GPU, Apple's GPU. `auto` is one of the first two.
DEVICES = ("auto", "cpu", "cuda", "mps")

THREADS_A_PROCESSOR = 16
LEAST_THREAD_LIMIT = 256  # a run may be resumed on a smaller machine
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
# How long a thread of OpenMP waits for the next loop before it sleeps: GCC's library counts turns of a loop, Intel's
# and LLVM's milliseconds. Their own choices (300,000 and 200) take the cores from other programs; see docs/speed.md.
WAITING = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
_WAITING_POLICY = "OMP_WAIT_POLICY"  # the standard's, which chooses for every library


def processors() -> int:
    """Number of processors that this process may use; taskset and containers may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def may_fork() -> bool:
    """Whether a process that has loaded torch may fork: outside Linux its frameworks may hang or crash in the fork."""
    return sys.platform.startswith("linux")


def wait_briefly() -> None:
    """Let the threads of OpenMP wait briefly, unless the user has set how, or torch is loaded, which has read it."""
    if "torch" not in sys.modules and not waiting():
        os.environ.update(WAITING)


def waiting() -> dict[str, str]:
    """The variables that say how the threads of OpenMP wait, as far as they are set."""
    return {name: os.environ[name] for name in (_WAITING_POLICY, *WAITING) if name in os.environ}


def memory_bytes() -> int | None:
    """Memory of this machine, or the container's limit; None if it is unknown."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else ""
    except (ValueError, OSError, AttributeError):
        return None
    return min(machine, int(limit)) if limit.isdecimal() else machine


def check_threads(threads: int, where: str = "threads") -> None:
    """Refuse more threads than are useful on this machine; `where` names the setting.

    Raises:
        ConfigError: naming the largest number.
    """
    most = max(LEAST_THREAD_LIMIT, THREADS_A_PROCESSOR * processors())
    if threads > most:
        raise ConfigError(f"{where} must be at most {most} on this machine (is {threads}); 0 is every core")


def refuse_above(needed: int, what: str, fields: str) -> None:
    """Refuse `what` if it needs more bytes than the machine has; `fields` are the settings to lower.

    Raises:
        ConfigError: naming both amounts.
    """
    memory = memory_bytes()
    if memory is not None and needed > memory:
        raise ConfigError(
            f"{what} needs at least {needed / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.1f} GiB: lower "
            f"{fields}"
        )


def world_size() -> int:
    """The number of ranks; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def ranks_of_machine() -> int:
    """The number of ranks on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def torchrun_words() -> list[str]:
    """The words before `covey train` that start as many ranks; on several machines those of this one. [] without
    torchrun.
    """
    size, here = world_size(), ranks_of_machine()
    if size == 1:
        return []
    words = ["--nproc-per-node", str(here)]
    if size > here:
        place = {"--node-rank": "GROUP_RANK", "--master-addr": "MASTER_ADDR", "--master-port": "MASTER_PORT"}
        words += ["--nnodes", str(size // here)]
        words += [word for option, name in place.items() for word in (option, os.environ.get(name, "0"))]
    return ["torchrun", *words, "-m"]
