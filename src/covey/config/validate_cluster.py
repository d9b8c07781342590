"""Validate the settings of runs on several ranks."""

from __future__ import annotations

from covey.config.common import ConfigError
from covey.config.llm import RunConfig


def check_cluster(config: RunConfig) -> None:
    """Check the number of logical shards.

    Raises:
        ConfigError: naming the field and the fix.
    """
    check_shards(config.cluster.shards, config.sampling.prompts_per_step)


def check_shards(shards: int, prompts: int) -> None:
    """Check that shards can be summed in the order of a binary tree, and that each may have a prompt.

    Raises:
        ConfigError: naming the field and the fix.
    """
    if shards & (shards - 1):
        raise ConfigError(
            f"cluster.shards must be a power of two, got {shards}: set it to {1 << (shards.bit_length() - 1)}"
        )
    if shards > prompts:
        raise ConfigError(
            f"{shards} shards are more than sampling.prompts_per_step = {prompts}, so some would never have a prompt: "
            "lower cluster.shards or the number of ranks, or raise prompts_per_step"
        )
