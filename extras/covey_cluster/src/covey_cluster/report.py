"""`covey plan --ranks` and `--cluster`: their options, which are the devices of a cluster and its simulated run.

The default speeds are those of H100 GPUs (80 GB, SXM), from their data sheet and published measurements; none was
measured with covey.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from covey.cli.options import add_fields, given_fields, option, option_of
from covey.config.common import ConfigError, check_shards, config_field
from covey.config.files import shortened
from covey.config.llm import RunConfig

UNITS = {"B": 1, **{f"{letter}B": 1000**at for at, letter in enumerate("KMGTP", start=1)}}
UNITS |= {f"{letter}IB": 1024**at for at, letter in enumerate("KMGTP", start=1)}
LARGEST_MEMORY = 1 << 50


@dataclass(frozen=True)
class DevicesConfig:
    """The devices that `covey plan --ranks` plans for; one rank uses one device."""

    device_memory: str = config_field("", "memory of a device, such as 80GiB or 80GB (this machine's)")
    devices_per_node: int = config_field(8, "devices of a machine", min=1, max=1024)
    node_link: float = config_field(300.0, "GB/s that a device sends within its node", min=1e-3, max=1e6)
    network_link: float = config_field(40.0, "GB/s that a device sends to other nodes", min=1e-3, max=1e6)
    weights_link: float = config_field(
        8.25, "GB/s at which new weights reach the samplers; a broadcast measured by verl", min=1e-3, max=1e6
    )
    device_tflops: float = config_field(989.0, "dense TFLOP/s of a device in bf16", min=1e-3, max=1e6)
    external_sampler: bool = config_field(False, "servers generate the completions, and ranks do not (with --cluster)")
    flops_use: float = config_field(0.4, "fraction of them that training reaches", min=1e-3, max=1)


@dataclass(frozen=True)
class SimulationConfig:
    """The run that `covey plan --cluster` simulates."""

    sampler_devices: tuple[int, ...] = config_field(
        (), "devices of the samplers, such as 8,16 (as many as ranks)", min=1
    )
    devices_per_server: int = config_field(
        0, "devices that serve a model together (as many as hold the weights in half of their memory)", min=0, max=1024
    )
    slots: int = config_field(0, "completions that a server generates at a time (128, or as many as fit)", min=0)
    tokens_alone: float = config_field(
        0.0, "tokens/s of a completion that a server generates alone (by --memory-bandwidth)", min=0, max=1e9
    )
    tokens_full: float = config_field(
        0.0, "tokens/s of all completions of a full server (by --memory-bandwidth)", min=0, max=1e9
    )
    memory_bandwidth: float = config_field(3350.0, "GB/s of a device's memory", min=1e-3, max=1e6)
    bandwidth_use: float = config_field(0.6, "fraction of it that sampling reaches", min=1e-3, max=1)
    lengths: str = config_field("", "run folder whose completions have the lengths that are drawn")
    mean_tokens: float = config_field(0.0, "mean length of completions, lognormal", min=0, max=1e6)
    sigma: float = config_field(0.9, "standard deviation of the logarithm of lengths; 0: no stragglers", min=0, max=5)
    limit: int = config_field(0, "longest completion (max_new_tokens)", min=0, max=1_000_000)
    staleness: tuple[int, ...] = config_field(
        (1, 2, 4), "continuous sampling: largest number of updates that the weights may lack", min=1, max=64
    )
    crash_every: float = config_field(0.0, "seconds between crashes of a random server; 0: none", min=0, max=1e9)
    restart: float = config_field(180.0, "seconds until a crashed server is back", min=0, max=1e9)
    simulated_steps: int = config_field(30, "simulated training steps", min=1, max=10_000)

    def __post_init__(self) -> None:
        if self.lengths and self.mean_tokens:
            raise ConfigError("--lengths and --mean-tokens both say how long completions are: give one of them")
        if not self.lengths and not self.mean_tokens:
            raise ConfigError(
                "--cluster needs the lengths of completions: --lengths RUN for those of a run folder, or "
                "--mean-tokens N and --sigma"
            )
        if self.limit and self.limit < self.mean_tokens:
            raise ConfigError(f"--limit {self.limit} is below --mean-tokens {self.mean_tokens:g}: raise it")


def memory_size(text: str) -> int:
    """Bytes of a size such as 80GiB (2^30) or 80 GB (10^9).

    Raises:
        ConfigError: for text that is not a size.
    """
    found = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([A-Za-z]{1,3})\s*", text, re.ASCII)
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"--device-memory must be a number and a unit, such as 80GiB or 80GB (is {shortened(text)})")
    size = round(float(found[1]) * unit)
    if not 1 << 20 <= size <= LARGEST_MEMORY:
        raise ConfigError(f"--device-memory must be from 1MiB to 1PiB (is {text.strip()})")
    return size


def check_planned_ranks(ranks: int, config: RunConfig) -> None:
    """Check a number of ranks by the rules that torchrun's ranks must meet.

    Raises:
        ConfigError: naming the fix.
    """
    if ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        raise ConfigError(f"--ranks must be a power of two, got {ranks}: give {below} or {2 * below}")
    if config.device == "mps" and ranks > 1:
        raise ConfigError("device is mps, which several ranks cannot use: plan with --device cuda or cpu")
    shards = config.cluster.shards or ranks
    if shards % ranks:
        raise ConfigError(
            f"{ranks} ranks cannot divide cluster.shards = {shards}: give --ranks {shards} or fewer, or raise --shards"
        )
    check_shards(shards, config.sampling.prompts_per_step, "sampling.prompts_per_step")


def add_options(command: argparse.ArgumentParser, ranks: argparse._ArgumentGroup) -> None:
    """Add the options of devices and of the simulation to `covey plan`."""
    add_fields(ranks, DevicesConfig)
    cluster = command.add_argument_group("throughput, predicted by a simulation")
    option(cluster, "--cluster", "simulate the ranks and servers that sample for them")
    add_fields(cluster, SimulationConfig)


def plan(arguments: argparse.Namespace, fields_given: Sequence[str], algorithm: str) -> str | None:
    """The memory of ranks, or with `--cluster` the cluster that they form with servers; None without `--ranks`.

    Raises:
        ConfigError: if it cannot be planned.
    """
    devices, simulated = given_fields(arguments, DevicesConfig), given_fields(arguments, SimulationConfig)
    if simulated and not arguments.cluster:
        raise ConfigError(f"{option_of(next(iter(simulated)))} belongs to --cluster, which simulates a run: add it")
    if arguments.cluster and arguments.ranks is None:
        raise ConfigError("--cluster needs the number of ranks that train: add --ranks N")
    if devices and arguments.ranks is None:
        raise ConfigError(f"{option_of(next(iter(devices)))} belongs to --ranks N: add it")
    if arguments.ranks is None:
        return None
    if "," in algorithm:
        raise ConfigError("--ranks plans one algorithm at a time: name one with --algorithm")
    simulation = SimulationConfig(**simulated) if arguments.cluster else None
    from covey.experiment.plan import find_dimensions, read_configs
    from covey_cluster.rank_report import RankPlanner, plan_ranks
    from covey_cluster.simulated_report import ClusterPlanner, plan_cluster

    model, ranks = arguments.model, arguments.ranks
    configs = read_configs(list(fields_given), [algorithm], arguments.critic_trunk, arguments.reward_model)
    place = DevicesConfig(**devices | ({"external_sampler": True} if arguments.cluster else {}))
    config = next(iter(configs.values()))
    planner = RankPlanner.of(find_dimensions(model), config, place, ranks, arguments.prompt_tokens)
    if simulation is None:
        return plan_ranks(planner, model, ranks)
    return plan_cluster(ClusterPlanner.of(planner, simulation, ranks))
