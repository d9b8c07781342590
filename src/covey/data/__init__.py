"""The nouns (Start, Rollout, Group, Batch) and the Protocols between the parts."""

from covey.data.collate import collate
from covey.data.protocols import Checkpoints, Critic, Follower, Grader, Observer, Policy, Sampler, Task
from covey.data.types import Batch, EndReason, Evaluation, Group, Rollout, Start

__all__ = [
    "Batch", "Checkpoints", "Critic", "EndReason", "Evaluation", "Follower", "Grader", "Group", "Observer", "Policy",
    "Rollout", "Sampler", "Start", "Task", "collate",
]  # fmt: skip
