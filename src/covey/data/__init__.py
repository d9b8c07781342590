"""Data types (Start, Rollout, Group, Batch) and the Protocols of the components."""

from covey.data.collate import collate
from covey.data.protocols import (
    Checkpoints,
    Critic,
    ExampleTrainer,
    Grader,
    Observer,
    Policy,
    ReferenceUpdater,
    RewardModelUpdater,
    Sampler,
    SamplerWeights,
    Stateful,
    Stateless,
    Task,
    Team,
    TrainingExample,
)
from covey.data.records import PromptTable, RolloutCredit, StepRecord, TokenTable
from covey.data.serialization import decode_groups, encode_groups
from covey.data.types import Batch, EndReason, Group, PolicyOutput, Rollout, Start

__all__ = [
    "Batch",
    "Checkpoints",
    "Critic",
    "EndReason",
    "ExampleTrainer",
    "Grader",
    "Group",
    "Observer",
    "Policy",
    "PolicyOutput",
    "PromptTable",
    "ReferenceUpdater",
    "RewardModelUpdater",
    "Rollout",
    "RolloutCredit",
    "Sampler",
    "SamplerWeights",
    "Start",
    "Stateful",
    "Stateless",
    "StepRecord",
    "Task",
    "Team",
    "TokenTable",
    "TrainingExample",
    "collate",
    "decode_groups",
    "encode_groups",
]  # fmt: skip
