"""Bytes and seconds of communication in a training step, from the sizes of a model and the speeds of links.

A collective over N ranks sends (N - 1) / N of its tensor from each rank, for a reduce-scatter, for an all-gather and
for the all-to-all of covey's reduction in the order of a tree. Seconds are bytes by the link: that within a node if the
ranks are in one node, else that between nodes, which is the slower. Latency is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.runtime.optimizer import MASTER_DTYPE
from covey_cluster.report import DevicesConfig

GIGA = 1e9


@dataclass(frozen=True)
class Passes:
    """What one rank does in a training step."""

    optimizer_steps: int
    microbatches: int  # backward passes in each optimizer step
    evaluations: int  # further forward passes of microbatches: of the reference, and of the old policy


@dataclass(frozen=True)
class Traffic:
    """Seconds of communication of a rank in a training step."""

    gradients: float  # after all backward passes of an optimizer step
    during_passes: float  # gathers of weights, and reductions after each backward pass: while a layer computes
    weights: float  # new weights to external samplers


def link_bytes_per_second(devices: DevicesConfig, ranks: int) -> float:
    """Bytes/s that each rank sends in a collective."""
    return (devices.node_link if ranks <= devices.devices_per_node else devices.network_link) * GIGA


def whole_weights_traffic(parameters: int, width: int, passes: Passes, devices: DevicesConfig, ranks: int) -> Traffic:
    """Every rank has all weights: gradients are reduced and gathered once in an optimizer step."""
    reduction = parameters * MASTER_DTYPE.itemsize * _sent(ranks) / link_bytes_per_second(devices, ranks)
    return Traffic(2 * passes.optimizer_steps * reduction, 0.0, handover_seconds(parameters, width, devices))


def sharded_traffic(
    parameters: int, width: int, passes: Passes, devices: DevicesConfig, ranks: int, *, is_exact: bool
) -> Traffic:
    """FSDP2: weights are gathered for every forward and every backward pass; gradients are reduced and stay sharded,
    once in an optimizer step if the order of sums is exact, else after every backward pass.
    """
    reduction = parameters * MASTER_DTYPE.itemsize * _sent(ranks) / link_bytes_per_second(devices, ranks)
    gathers = gather_seconds(parameters, width, passes, devices, ranks)
    weights = handover_seconds(parameters, width, devices)
    if is_exact:
        return Traffic(passes.optimizer_steps * reduction, gathers, weights)
    return Traffic(0.0, gathers + passes.optimizer_steps * passes.microbatches * reduction, weights)


def gather_seconds(parameters: int, width: int, passes: Passes, devices: DevicesConfig, ranks: int) -> float:
    """Gathers of sharded weights: two for every backward pass with its forward pass, one for an evaluation."""
    gather = parameters * width * _sent(ranks) / link_bytes_per_second(devices, ranks)
    return (2 * passes.optimizer_steps * passes.microbatches + passes.evaluations) * gather


def handover_seconds(parameters: int, width: int, devices: DevicesConfig) -> float:
    """Seconds of sending all weights to the samplers."""
    return parameters * width / (devices.weights_link * GIGA)


def _sent(ranks: int) -> float:
    return (ranks - 1) / ranks
