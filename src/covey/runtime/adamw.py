"""AdamW whose result for a number does not depend on the other numbers of its tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# torch's fused kernel for CPUs computes whole vectors of up to 16 numbers with fused multiply-adds, and the rest of a
# tensor without, so a number at the end of a tensor has other bits than one in its middle. Ranks divide tensors, so
# here each number is part of a whole vector.
VECTOR = 16
EPSILON = 1e-8


@dataclass
class Moments:
    """The state of one parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor  # number of steps, a scalar in fp32


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over fp32 tensors by name."""

    def __init__(self, masters: Mapping[str, Tensor], betas: tuple[float, float], decay: Mapping[str, float]) -> None:
        """`decay` has the weight decay of every tensor."""
        self.masters, self.betas, self.decay = masters, betas, decay
        self.moments: dict[str, Moments] = {}  # of the tensors that have had a gradient
        self.fused = all(master.device.type in ("cpu", "cuda") for master in masters.values())

    def step(self, learning_rate: float) -> None:
        """Apply the gradients of the tensors that have one."""
        names = [name for name, master in self.masters.items() if master.grad is not None]
        for name in names:
            if name not in self.moments:
                self.set_moments(name, torch.zeros_like(self.masters[name]), torch.zeros_like(self.masters[name]), 0)
        for decay in {self.decay[name] for name in names}:
            self._apply([name for name in names if self.decay[name] == decay], learning_rate, decay)

    def set_moments(self, name: str, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> None:
        """Set the state of a tensor."""
        # The fused kernels need the step count on the weights' device, the others on the CPU.
        where = exp_avg.device if self.fused else torch.device("cpu")
        self.moments[name] = Moments(exp_avg, exp_avg_sq, torch.tensor(step, dtype=torch.float32, device=where))

    def _apply(self, names: list[str], learning_rate: float, decay: float) -> None:
        pieces: list[list[Tensor]] = []  # weights, gradients, exp_avg, exp_avg_sq and step
        ends: list[tuple[list[Tensor], list[Tensor]]] = []
        for name in names:
            master, moments = self.masters[name], self.moments[name]
            assert master.grad is not None
            flat = [one.view(-1) for one in (master.detach(), master.grad, moments.exp_avg, moments.exp_avg_sq)]
            whole = master.numel() // VECTOR * VECTOR
            step = moments.step.clone()
            if whole:
                pieces.append([*(one[:whole] for one in flat), moments.step])
            if whole < master.numel():
                end = [one[whole:] for one in flat]
                padded = [torch.nn.functional.pad(one, (0, VECTOR - len(one))) for one in end]
                ends.append((end, padded))
                pieces.append([*padded, step if whole else moments.step])
        weights, gradients, means, squares, steps = (list(column) for column in zip(*pieces, strict=True))
        adamw(
            weights, gradients, means, squares, [], steps, fused=self.fused, amsgrad=False, beta1=self.betas[0],
            beta2=self.betas[1], lr=learning_rate, weight_decay=decay, eps=EPSILON, maximize=False,
        )  # fmt: skip
        for end, padded in ends:
            for one, computed in zip(end, padded, strict=True):
                one.copy_(computed[: len(one)])
