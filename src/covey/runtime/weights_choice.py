"""The choice of `cluster.weights = "auto"`: whole weights on every rank, or sharded weights (FSDP2)."""

from __future__ import annotations

from covey.runtime.distributed import GradientTree
from covey.runtime.optimizer import state_bytes

LARGEST_REPLICA = 0.7  # of a device's memory; the rest is for activations and for sampling


def replica_bytes(trained: int, frozen: int, itemsize: int, shards: int = 1, *, eight_bit_moments: bool = False) -> int:
    """Bytes of whole weights with their masters, moments and gradients, and of frozen weights.

    18 bytes for each trained weight (12 with moments in 8 bits) and 2 for each of the reference in bf16.

    Args:
        trained: number of weights of the policy and of a critic.
        frozen: number of weights of the reference and of reward models.
        itemsize: bytes of a weight in the precision of the run.
        shards: logical shards of a rank, whose gradients are added in a tree.
    """
    state = state_bytes(trained, itemsize, eight_bit_moments=eight_bit_moments)
    gradients = (1 + GradientTree.copies(shards)) * state.gradients
    return (trained + frozen) * itemsize + state.masters + state.moments + gradients


def fits_replicated(
    trained: int, frozen: int, itemsize: int, shards: int, device_bytes: int, *, eight_bit_moments: bool = False
) -> bool:
    """Whether every rank should have whole weights. Arguments as in `replica_bytes`."""
    needed = replica_bytes(trained, frozen, itemsize, shards, eight_bit_moments=eight_bit_moments)
    return needed <= LARGEST_REPLICA * device_bytes
