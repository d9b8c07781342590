"""torchrun, as its environment variables describe it: the number of ranks, and the command that starts them."""

from __future__ import annotations

import os


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
