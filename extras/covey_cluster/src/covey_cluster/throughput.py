"""Tokens/s of a trainer and of a server, from the model and the devices: roofline estimates.

They are for planning before there is anything to measure. A forward pass takes 2 FLOPs a weight and token, a backward
pass 4. A server generates a token of n completions in the time of reading the weights and their keys and values once.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.config import ConfigError, RunConfig
from covey.llm.generation.decoder import token_bytes
from covey.llm.memory import Dimensions
from covey_cluster.communication import GIGA, Traffic
from covey_cluster.report import DevicesConfig, SimulationConfig
from covey_cluster.servers import RooflineSpeed

FORWARD, BACKWARD = 2, 4  # FLOPs of a weight and a token
MOST_SLOTS = 128
LARGEST_MODEL = 0.5  # of the memory of a server's devices; the rest is for keys and values
SERVER_MEMORY = 0.9  # of the devices that a server uses


def passes_of_a_token(config: RunConfig) -> int:
    """FLOPs of a weight and a token in a training step: the update, the reference, and the old policy if needed."""
    update = config.update.epochs * (FORWARD + BACKWARD + (FORWARD if config.update.recompute else 0))
    return update + FORWARD * evaluations_of_a_token(config)


def evaluations_of_a_token(config: RunConfig) -> int:
    """Forward passes besides those of the update: the reference, and the old policy if there are several updates."""
    return 2 if config.update.minibatches * config.update.epochs > 1 else 1


@dataclass(frozen=True)
class TrainerSpeed:
    """Seconds of an update."""

    computing: float
    traffic: Traffic

    @property
    def seconds(self) -> float:
        """Gathers overlap with computing; the reduction after the last backward pass does not."""
        return max(self.computing, self.traffic.during_passes) + self.traffic.gradients


def computing_seconds(parameters: int, tokens: float, config: RunConfig, devices: DevicesConfig, ranks: int) -> float:
    """Seconds that all ranks compute for the tokens of a step."""
    flops = parameters * tokens * passes_of_a_token(config)
    return flops / (ranks * devices.device_tflops * 1e12 * devices.flops_use)


@dataclass(frozen=True)
class ServerPlan:
    """A server of the model."""

    devices: int
    slots: int
    speed: RooflineSpeed


def plan_server(
    size: Dimensions, width: int, context: float, memory: int, devices: DevicesConfig, plan: SimulationConfig
) -> ServerPlan:
    """The devices, slots and speed of a server.

    Args:
        width: bytes of a weight, a key and a value.
        context: mean tokens of a prompt and its completion.
        memory: bytes of a device.

    Raises:
        ConfigError: if its devices cannot hold the model and one completion.
    """
    weights = size.parameters * width
    count = plan.devices_per_server or 1
    while not plan.devices_per_server and weights > LARGEST_MODEL * memory * count:
        count *= 2
    cache = token_bytes(size.layers, size.attention_heads, width) * context
    fitting = int((SERVER_MEMORY * memory * count - weights) // cache)
    if fitting < 1:
        raise ConfigError(
            f"a server of {count} devices cannot hold the weights and a completion: raise --devices-per-server"
        )
    slots = plan.slots or min(MOST_SLOTS, fitting)
    bandwidth = plan.memory_bandwidth * GIGA * plan.bandwidth_use * count
    computed = devices.device_tflops * 1e12 * devices.flops_use * count / (FORWARD * size.parameters)
    full = min(slots * bandwidth / (weights + slots * cache), computed)
    alone = bandwidth / (weights + cache)
    return ServerPlan(count, slots, RooflineSpeed(plan.tokens_alone or alone, plan.tokens_full or full))
