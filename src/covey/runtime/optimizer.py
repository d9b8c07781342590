"""AdamW with fp32 master weights for a module of any precision.

bf16 keeps eight bits of a weight, so an update below 1/256 of it would be rounded away; updates must be accumulated in
fp32. The same holds for the gradients of several microbatches.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from covey.config import ConfigError
from covey.data import Team
from covey.runtime.distributed import ALONE, GradientTree

NORM_ROW = 256  # see `total_norm`
MASTER_DTYPE = torch.float32


@dataclass(slots=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float  # of all gradients together, before clipping
    applied: bool  # False: no gradient, or one that is not finite, so nothing changed


class StateBytes(NamedTuple):
    """Bytes that `MasterAdamW` adds to a module's parameters."""

    masters: int  # 0 if the parameters are their own masters
    moments: int
    gradients: int  # of the masters, during an update


def state_bytes(parameters: int, itemsize: int) -> StateBytes:
    """Bytes of masters, moments and gradients of a module with `parameters` numbers of `itemsize` bytes each."""
    size = parameters * MASTER_DTYPE.itemsize
    return StateBytes(masters=0 if itemsize == MASTER_DTYPE.itemsize else size, moments=2 * size, gradients=size)


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over fp32 masters of a module's trainable parameters.

    An fp32 parameter is its own master. For any other, each backward adds its gradient to the master's fp32 gradient
    and frees it, and each step rounds the new master into the parameter. A shared parameter counts once, under its
    first name. Weight decay, off by default, applies to matrices only: norms and biases are vectors.

    A module may have only one of these optimizers at a time. `lr` is the learning rate before the first `step`.
    """

    def __init__(
        self,
        module: nn.Module,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        team: Team = ALONE,
    ) -> None:
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0 (inf never clips), got {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self._team, self._shards = team, GradientTree()
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ConfigError("the model has no trainable parameter: unfreeze some")
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            self.masters[name] = self._master_of(parameter)
        self._fused = all(master.device.type in ("cpu", "cuda") for master in self.masters.values())
        masters = list(self.masters.values())
        groups = [
            {"params": [m for m in masters if m.dim() >= 2], "weight_decay": weight_decay},
            {"params": [m for m in masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=self._fused)

    def _master_of(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == MASTER_DTYPE:
            return parameter
        master = parameter.detach().to(MASTER_DTYPE)
        handle = parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))
        weakref.finalize(self, handle.remove)  # so that a later optimizer of this module does not inherit the hook
        return master

    @torch.no_grad()
    def end_shard(self) -> None:
        """Add the gradients since the last call to those of this rank's shards before."""
        masters = self.masters.values()
        self._shards.add([torch.zeros_like(one) if one.grad is None else one.grad for one in masters])
        self._adamw.zero_grad()

    @torch.no_grad()
    def _sum_shards(self) -> None:
        """Replace the gradients by their sum over the shards of all ranks."""
        sums = self._shards.total()
        self._team.sum(sums)
        for master, total in zip(self.masters.values(), sums, strict=True):
            master.grad = total.add_(0.0)  # -0.0 becomes 0.0, as it does if a rank adds the zeros of an empty shard

    @torch.no_grad()
    def step(self, learning_rate: float) -> StepResult:
        """Clip the gradients to `max_grad_norm`, apply them and free them.

        If the norm is not finite, or there is no gradient, weights and state do not change.
        """
        if self._team.shards > 1:
            self._sum_shards()
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = total_norm(gradients)
        result = StepResult(float(norm), applied=bool(gradients) and math.isfinite(norm))
        if result.applied:
            if math.isfinite(self.max_grad_norm):
                torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._copy_to_module()
        self._adamw.zero_grad()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Masters, moments and step counts by parameter name: nested dicts of tensors and numbers, not copied.

        The masters determine the module's trainable parameters, so a checkpoint needs no second copy of them.
        """
        states = {name: self._adamw.state[m] for name, m in self.masters.items() if m in self._adamw.state}
        return {
            "masters": {name: master.detach() for name, master in self.masters.items()},
            "exp_avg": {name: state["exp_avg"] for name, state in states.items()},
            "exp_avg_sq": {name: state["exp_avg_sq"] for name, state in states.items()},
            "step": {name: int(state["step"]) for name, state in states.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state, bit for bit, and set the module's parameters from its masters.

        Raises:
            ConfigError: if the state belongs to a module with other parameters.
        """
        shapes = {name: tuple(master.shape) for name, master in self.masters.items()}
        saved = {name: tuple(master.shape) for name, master in state["masters"].items()}
        unlike = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
        if unlike:
            raise ConfigError(
                f"the saved optimizer belongs to another model: {len(unlike)} parameters differ, such as {unlike[0]} "
                f"({saved.get(unlike[0], 'absent')} saved, {shapes.get(unlike[0], 'absent')} here)"
            )
        self._adamw.state.clear()
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
            master.grad = None
            if name in state["step"]:
                # The fused kernels need the step count on the weights' device, the others on the CPU.
                where = master.device if self._fused else torch.device("cpu")
                self._adamw.state[master] = {
                    "step": torch.tensor(state["step"][name], dtype=torch.float32, device=where),
                    "exp_avg": torch.empty_like(master).copy_(state["exp_avg"][name]),
                    "exp_avg_sq": torch.empty_like(master).copy_(state["exp_avg_sq"][name]),
                }
        self._copy_to_module()

    def _copy_to_module(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all elements together, a scalar in fp64; 0 if there are none.

    torch sums fp32 tensors in fp32, with a relative error of 3e-5 and more for 100 million numbers. Here the squares of
    a large tensor are summed in fp32 within rows of 256, and the rows in fp64: an error of 1e-10, in a sixth of the
    time of fp64 throughout.
    """
    pieces: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() // NORM_ROW * NORM_ROW if flat.numel() > NORM_ROW**2 else 0
        if whole:
            pieces.append(torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1))
        if whole < flat.numel():
            pieces.append(flat[whole:])
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)


def _move_gradient_to(master: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's new gradient to its master's and frees it.

    The master's gradient keeps its memory between steps, because page faults cost more than writing.
    """
    memory: Tensor | None = None

    def hook(parameter: Tensor) -> None:
        nonlocal memory
        assert parameter.grad is not None
        if master.grad is None:
            memory = torch.empty_like(master) if memory is None else memory
            master.grad = memory.copy_(parameter.grad)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
