"""On-policy distillation: a teacher as a term of the loss.

Shapes: B rollouts, T decisions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from covey.core import kl
from covey.data import Batch, PolicyOutput


@dataclass(frozen=True)
class Distillation:
    """On-policy distillation: the divergence to a teacher at every decision of the policy's own rollouts, as a term of
    the loss. GKD (arXiv 2306.13649), eq. 4. By default there is no teacher.

    The divergence is computed in the policy's forward pass (`PolicyOutput.teacher_BT`).
    """

    weight: float = 0.0  # of the divergence in the loss; 0: there is no teacher
    beta: float = kl.REVERSE  # of the divergence (`covey.core.kl.jensen_shannon`)

    def rows(self, batch: Batch) -> Tensor:
        """Bool [B]: the rows that have a gradient whatever their advantages are."""
        return batch.has_teacher_B & (self.weight > 0)

    def add(self, loss_BT: Tensor, output: PolicyOutput, batch: Batch) -> Tensor:
        """loss_BT + weight * divergence_BT."""
        if output.teacher_BT is None:
            return loss_BT
        return loss_BT + self.weight * torch.where(batch.mask_BT, output.teacher_BT, 0.0)

    def measured(self, output: PolicyOutput) -> dict[str, Tensor]:
        """divergence_BT in nats, by the name of its metric; empty if the output has none."""
        return {} if output.teacher_BT is None else {"teacher/divergence": output.teacher_BT.detach()}
