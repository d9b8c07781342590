"""Chooses between weights on every rank and weights sharded by FSDP2, by the memory of the devices."""

from __future__ import annotations

from covey.config import ConfigError, RunConfig
from covey.config.machine import memory_bytes, ranks_of_machine
from covey.data import Team
from covey.experiment.plan import count_reward_models
from covey.llm.memory.dimensions import find_model_config, read_dimensions
from covey.llm.memory.estimate import critic_weights_of, frozen_parameters, trained_parameters
from covey.llm.model.loading import find_model
from covey.runtime.device import choose_device, choose_precision, total_memory_bytes
from covey.runtime.distributed import exchange_json
from covey.runtime.optimizer import fits_replicated


def must_shard(config: RunConfig, team: Team) -> bool:
    """Whether the ranks must divide the weights, because they do not fit on the device of each; the same on all ranks.

    Downloads the model if it is on a hub.

    Raises:
        ConfigError: if the model is not found.
    """
    device = choose_device(config.device)
    memory = total_memory_bytes(device) if device.type == "cuda" else _share_of_machine()
    model_config = find_model_config(config.model)
    if model_config is None:
        find_model(config.model)
        model_config = find_model_config(config.model)
    if model_config is None:
        raise ConfigError(f"there is no config.json of {config.model}: set cluster.weights")
    size = read_dimensions(model_config, config.model)
    trained = trained_parameters(size, config) + critic_weights_of(size, config)
    frozen = frozen_parameters(size, config) + count_reward_models(config)
    width = choose_precision(config.precision, device).itemsize
    shards, eight_bit_moments = team.shards // team.size, config.update.eight_bit_moments
    fits = memory is None or fits_replicated(
        trained, frozen, width, shards, memory, eight_bit_moments=eight_bit_moments
    )
    return any(exchange_json(team, not fits))


def _share_of_machine() -> int | None:
    memory = memory_bytes()
    return None if memory is None else memory // ranks_of_machine()
