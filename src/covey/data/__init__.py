"""Data types (Start, Rollout, Group, Batch) and the Protocols of the components."""

from covey.data.collate import collate
from covey.data.protocols import (
    Checkpoints,
    Critic,
    Grader,
    Observer,
    Policy,
    ReferenceUpdater,
    RewardModelUpdater,
    Sampler,
    Task,
)
from covey.data.types import Batch, EndReason, Group, PolicyOutput, Rollout, Start

__all__ = [
    "Batch",
    "Checkpoints",
    "Critic",
    "EndReason",
    "Grader",
    "Group",
    "Observer",
    "Policy",
    "PolicyOutput",
    "ReferenceUpdater",
    "RewardModelUpdater",
    "Rollout",
    "Sampler",
    "Start",
    "Task",
    "collate",
]  # fmt: skip
