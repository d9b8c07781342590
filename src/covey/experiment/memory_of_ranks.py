"""Chooses between weights on every rank and weights sharded by FSDP2, by the memory of the devices."""

from __future__ import annotations

from covey.config import ConfigError, RunConfig
from covey.config.machine import memory_bytes
from covey.data import Team
from covey.llm.memory.dimensions import find_model_config, read_dimensions
from covey.llm.memory.estimate import predict
from covey.llm.model.loading import find_model
from covey.runtime.device import choose_device, choose_precision, total_memory_bytes
from covey.runtime.distributed import exchange_json
from covey.runtime.ranks import ranks_of_machine

# Fraction of a device's memory that the weights may take with everything that has their size. Activations, sampling and
# the program need the rest.
STATE_FRACTION = 0.7
STATE = (
    "weights", "fp32 master weights", "optimizer moments", "reference", "gradients", "critic's weights",
    "critic's master weights", "critic's moments", "critic's gradients",
)  # fmt: skip


def must_shard(config: RunConfig, team: Team) -> bool:
    """Whether the ranks must divide the weights, because they do not fit on the device of each; the same on all ranks.

    Downloads the model if it is on a hub.

    Raises:
        ConfigError: if the model is not found.
    """
    device = choose_device(config.device)
    memory = total_memory_bytes(device) if device.type == "cuda" else _share_of_machine()
    needed = replicated_bytes(config, choose_precision(config.precision, device).itemsize, device.type, team)
    too_large = memory is not None and needed > STATE_FRACTION * memory
    return any(exchange_json(team, too_large))


def replicated_bytes(config: RunConfig, width: int, device: str, team: Team) -> int:
    """Bytes of the weights on each rank, with everything that has their size, if every rank has all.

    Args:
        width: bytes of a weight.
        device: "cpu" or "cuda".
    """
    model_config = find_model_config(config.model)
    if model_config is None:
        find_model(config.model)
        model_config = find_model_config(config.model)
    if model_config is None:
        raise ConfigError(f"there is no config.json of {config.model}: set cluster.weights")
    plan = predict(read_dimensions(model_config, config.model), config, device=device, width=width)
    gradients = plan.parts["gradients"] + plan.parts["critic's gradients"]
    copies = (team.shards // team.size).bit_length() - 1 if team.shards > team.size else 0  # of `GradientTree`
    return sum(plan.parts[name] for name in STATE) + copies * gradients


def _share_of_machine() -> int | None:
    memory = memory_bytes()
    return None if memory is None else memory // ranks_of_machine()
