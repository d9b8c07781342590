"""The ranks that torchrun has started, from its environment variables. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.llm import check_shards
from covey.config.machine import world_size


def own_rank() -> int:
    """The rank of this process, from 0; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The rank of this process among those of its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@dataclass
class _State:
    joined: bool = False  # True from the moment at which this process has met the other ranks


STATE = _State()


def is_echo() -> bool:
    """True if an error of this process is also that of another one, which reports it: every rank of a machine reads the
    same recipe and the same data before the ranks meet.
    """
    return local_rank() > 0 and not STATE.joined


def check_ranks(config: RunConfig | ControlConfig) -> None:
    """Check that the ranks that torchrun has started can train this config.

    Raises:
        ConfigError: naming the fix.
    """
    size = world_size()
    if size == 1:
        return
    if isinstance(config, ControlConfig):
        raise ConfigError(f"an agent is trained by one process, and torchrun has started {size}: leave out torchrun")
    if config.iteration.steps:
        raise ConfigError(
            f"an iterative run is trained by one process, and torchrun has started {size}: leave out torchrun"
        )
    if size & (size - 1):
        raise ConfigError(f"the number of ranks must be a power of two, got {size}: change --nproc-per-node")
    shards = config.cluster.shards or size
    if shards % size:
        raise ConfigError(
            f"{size} ranks cannot divide cluster.shards = {shards}: start {shards} ranks or fewer, or begin a run with "
            "more shards"
        )
    check_shards(shards, config.sampling.prompts_per_step)
