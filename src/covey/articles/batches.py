"""Batches that are built from tensors, where no rollout was sampled by covey.

Shapes: B rows, T decisions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.core.aggregation import count
from covey.data import Batch


def batch_of(mask_BT: Tensor, **given: Any) -> Batch:
    """A batch of which only the mask and what is given are known."""
    zeros_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
    zeros_B = zeros_BT[:, 0]
    blank: dict[str, Any] = {
        "context": ((),) * len(mask_BT),
        "actions_BT": zeros_BT.long(),
        "mask_BT": mask_BT,
        "behavior_logprobs_BT": zeros_BT,
        "reward_B": zeros_B,
        "rewards_BT": zeros_BT,
        "valid_B": zeros_B == 0,
        "truncated_B": zeros_B != 0,
        "group_B": zeros_B.long(),
        "step_end_BT": zeros_BT != 0,
    }
    return Batch(**blank | given)


def weighed(algorithm: Algorithm, batch: Batch) -> Batch:
    """The batch with what each decision counts, in the precision of its advantages."""
    assert batch.advantages_BT is not None
    weights_BT = algorithm.aggregation(batch.mask_BT.double(), count(batch.mask_BT))
    return replace(batch, weights_BT=weights_BT.to(batch.advantages_BT.dtype))
