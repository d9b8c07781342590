"""AdamW with fp32 master weights for a module of any precision.

bf16 keeps eight bits of a weight, so an update below 1/256 of it would be rounded away; updates must be accumulated in
fp32. The same holds for the gradients of several microbatches.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from covey.config import ConfigError
from covey.core import schedules
from covey.core.precision import widened
from covey.data import ReferenceUpdater, Team
from covey.runtime.distributed import ALONE, WHOLE, GradientTree, Weights, is_sharded, local, own_rows, with_local

# See `row_squares`.
EXACT_NUMBERS = 1 << 16
SHORTEST_PIECE, LONGEST_PIECE = 32, 512
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


def state_bytes(parameters: int, itemsize: int, *, eight_bit_moments: bool = False) -> StateBytes:
    """Bytes of masters, moments and gradients of a module with `parameters` numbers of `itemsize` bytes each."""
    size = parameters * MASTER_DTYPE.itemsize
    moment = moment_bytes(parameters) if eight_bit_moments else size
    return StateBytes(masters=0 if itemsize == MASTER_DTYPE.itemsize else size, moments=2 * moment, gradients=size)


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over fp32 masters of a module's trainable parameters.

    An fp32 parameter is its own master. For any other, each backward adds its gradient to the master's fp32 gradient
    and frees it, and each step rounds the new master into the parameter. A shared parameter counts once, under its
    first name. Weight decay, off by default, applies to matrices only: norms and biases are vectors.

    The weights may be sharded (`runtime/distributed.py`). Masters and moments are then this rank's rows of them, and
    FSDP2 adds the gradients of the ranks. Gradients of other parameters are added here, once in a step.

    With `eight_bit_moments`, the moments of large matrices are kept in 8 bits (`QuantizedMoment`).

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
        weights: Weights = WHOLE,
        *,
        eight_bit_moments: bool = False,
    ) -> None:
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0 (inf never clips), got {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self._team, self._weights, self._shards = team, weights, GradientTree()
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ConfigError("the model has no trainable parameter: unfreeze some")
        self._sharded = [name for name, parameter in self.parameters.items() if is_sharded(parameter)]
        self._whole = [name for name in self.parameters if name not in self._sharded]
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            self.masters[name] = self._master_of(parameter)
        decay = {name: weight_decay if parameter.dim() >= 2 else 0.0 for name, parameter in self.parameters.items()}
        lengths = {name: block_length(parameter.shape) for name, parameter in self.parameters.items()}
        blocks = {name: length for name, length in lengths.items() if length and eight_bit_moments}
        self._adamw = AdamW(self.masters, betas, decay, blocks)

    def _master_of(self, parameter: nn.Parameter) -> Tensor:
        if is_sharded(parameter):
            return local(parameter)
        if parameter.dtype == MASTER_DTYPE:
            return parameter
        master = parameter.detach().to(MASTER_DTYPE)
        handle = parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))
        weakref.finalize(self, handle.remove)  # so that a later optimizer of this module does not inherit the hook
        return master

    def before_last_pass(self) -> None:
        """The next backward pass is the last one before `end_shard`."""
        self._weights.before_last_pass()

    @torch.no_grad()
    def end_shard(self) -> None:
        """Add the gradients since the last call to those of this rank's shards before."""
        masters = [self.masters[name] for name in self._whole]
        self._shards.add([torch.zeros_like(one) if one.grad is None else one.grad for one in masters])
        for master in masters:
            master.grad = None
        self._weights.end_shard()

    def _sum_shards(self) -> None:
        """Replace the gradients by their sum over the shards of all ranks."""
        sums = self._shards.total()
        self._team.sum(sums)
        for name, total in zip(self._whole, sums, strict=True):
            self.masters[name].grad = total
        for name in self._sharded:
            gradient = self.parameters[name].grad
            self.masters[name].grad = torch.zeros_like(self.masters[name]) if gradient is None else local(gradient)
        for master in self.masters.values():
            assert master.grad is not None
            master.grad.add_(0.0)  # -0.0 becomes 0.0, as it does if a rank adds the zeros of an empty shard

    def _norm(self) -> Tensor:
        """The norm of all gradients. It does not depend on the division of the weights."""
        gradients = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        squares = {name: row_squares(gradient, self.parameters[name].numel()) for name, gradient in gradients.items()}
        if self._sharded:
            own, rows = ([squares[name] for name in self._sharded], [len(self.parameters[n]) for n in self._sharded])
            squares |= zip(self._sharded, self._weights.whole_rows(own, rows), strict=True)
        return norm_of(list(squares.values()))

    @torch.no_grad()
    def step(self, learning_rate: float) -> StepResult:
        """Clip the gradients to `max_grad_norm`, apply them and free them.

        If the norm is not finite, or there is no gradient, weights and state do not change.
        """
        if self._team.shards > 1:
            self._sum_shards()
        norm = self._norm()
        present = any(master.grad is not None for master in self.masters.values())
        result = StepResult(float(norm), applied=present and math.isfinite(norm))
        if result.applied:
            if math.isfinite(self.max_grad_norm):
                torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.max_grad_norm, norm)
            self._adamw.step(learning_rate)
            self._copy_to_module()
            self._weights.reshard()
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad = None
        return result

    def checksum(self) -> int:
        """The sum of the bits of all masters that are not sharded, as integers: the same on all ranks."""
        flat = [self.masters[name].detach().view(-1) for name in self._whole]
        pairs = (one[: len(one) // 2 * 2].view(torch.int64).sum() for one in flat)  # 30 times the speed of int32
        ends = (one[len(one) // 2 * 2 :].view(torch.int32).sum() for one in flat)
        return sum(map(int, pairs)) + sum(map(int, ends))

    def state_dict(self) -> dict[str, Any]:
        """Masters, moments and step counts by parameter name: nested dicts of tensors and numbers, not copied.

        The masters determine the module's trainable parameters, so a checkpoint needs no second copy of them.
        """
        moments = self._adamw.moments
        return {
            "masters": {name: self._as_saved(name, master.detach()) for name, master in self.masters.items()},
            "exp_avg": {name: self._as_saved(name, of.exp_avg) for name, of in moments.items()},
            "exp_avg_sq": {name: self._as_saved(name, of.exp_avg_sq) for name, of in moments.items()},
            "step": {name: int(of.step) for name, of in moments.items()},
        }

    def _as_saved(self, name: str, rows: Tensor | QuantizedMoment) -> Any:
        """This rank's rows of a tensor as a part of the whole one; of a quantized moment its codes and scales."""
        if isinstance(rows, QuantizedMoment):
            return {"codes": self._as_saved(name, rows.codes), "scales": self._as_saved(name, rows.scales)}
        return with_local(self.parameters[name], rows)

    def _moment(self, name: str, saved: Any, *, signed: bool) -> Tensor | QuantizedMoment:
        """This rank's rows of a saved moment, in memory of their own."""
        parameter = self.parameters[name]
        if isinstance(saved, dict):
            codes, scales = (own_rows(saved[key], parameter).clone() for key in ("codes", "scales"))
            return QuantizedMoment(codes.to(parameter.device), scales.to(parameter.device), signed=signed)
        return torch.empty_like(self.masters[name]).copy_(own_rows(saved, parameter))

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state, bit for bit, and set the module's parameters from its masters.

        Raises:
            ConfigError: if the state belongs to a module with other parameters, or has moments of other precision.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        saved = {name: tuple(master.shape) for name, master in state["masters"].items()}
        unlike = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
        if unlike:
            raise ConfigError(
                f"the saved optimizer belongs to another model: {len(unlike)} parameters differ, such as {unlike[0]} "
                f"({saved.get(unlike[0], 'absent')} saved, {shapes.get(unlike[0], 'absent')} here)"
            )
        for name in state["step"]:
            if isinstance(state["exp_avg"][name], dict) is not (name in self._adamw.blocks):
                raise ConfigError(
                    f"the saved optimizer has moments of another precision, such as those of {name}: set "
                    "update.eight_bit_moments as it was"
                )
        self._adamw.moments.clear()
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            master.copy_(own_rows(state["masters"][name], parameter))
            master.grad = parameter.grad = None
            if name in state["step"]:
                exp_avg = self._moment(name, state["exp_avg"][name], signed=True)
                exp_avg_sq = self._moment(name, state["exp_avg_sq"][name], signed=False)
                self._adamw.set_moments(name, exp_avg, exp_avg_sq, state["step"][name])
        self._copy_to_module()
        self._weights.reshard()

    def _copy_to_module(self) -> None:
        for name in self._whole:
            if self.parameters[name] is not self.masters[name]:
                self.parameters[name].copy_(self.masters[name])


def norm_of(squares: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements of some tensors, from their `row_squares`, a scalar in fp64; 0 without any."""
    return torch.cat(list(squares)).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


def row_squares(tensor: Tensor, numbers: int) -> Tensor:
    """squares_R: the sum of squares of each row (along the first dimension), in fp64, or in the device's widest dtype.

    A row has the same bits in any part of the tensor, so that ranks with some rows each find the same norm.

    torch sums fp32 tensors in fp32, with a relative error of 3e-5 and more for 100 million numbers. Here the squares of
    a large tensor are summed in fp32 within pieces of a row, and the pieces in fp64: an error of 1e-10, in a sixth of
    the time of fp64 throughout.

    Args:
        tensor: some rows.
        numbers: of the whole tensor.
    """
    matrix = tensor.reshape(len(tensor) if tensor.dim() else 1, -1) if tensor.numel() else tensor.new_zeros(0, 1)
    rows, width = matrix.shape
    piece = max(size for size in range(1, min(width, LONGEST_PIECE) + 1) if width % size == 0)
    if numbers <= EXACT_NUMBERS or piece < SHORTEST_PIECE:
        return widened(matrix).square().sum(dim=1)
    norms = torch.linalg.vector_norm(matrix.view(rows * width // piece, piece), dim=1)
    return widened(norms).square().view(rows, width // piece).sum(dim=1)


def _move_gradient_to(master: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's new gradient to its master's and frees it.

    On a CPU the master's gradient keeps its memory between steps, because page faults cost more than writing. On a GPU
    its memory is for the keys and values of the sampler then.
    """
    memory: Tensor | None = None
    keeps = master.device.type == "cpu"

    def hook(parameter: Tensor) -> None:
        nonlocal memory
        assert parameter.grad is not None
        if master.grad is None:
            own = torch.empty_like(master) if memory is None else memory
            master.grad = own.copy_(parameter.grad)
            memory = own if keeps else None
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook


FALLING = {"linear": schedules.linear, "cosine": schedules.cosine}


def learning_rate_schedule(
    name: str, peak: float, *, steps: int, warmup_steps: int, restarts: Sequence[int] = ()
) -> schedules.Schedule:
    """The schedule "constant", "linear" or "cosine", which rises to `peak` over the first `warmup_steps`.

    A falling one begins again at `peak` after each step of `restarts`, and falls until the next or the last step.
    """
    if name == "constant":
        return schedules.constant(peak, warmup_steps=warmup_steps)

    def fall(begin: int, end: int) -> schedules.Schedule:
        return FALLING[name](peak, steps=end - begin, warmup_steps=0 if begin else warmup_steps)

    return schedules.restarted(fall, steps, restarts)


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


# torch's fused kernel for CPUs computes whole vectors of up to 16 numbers with fused multiply-adds, and the rest of a
# tensor without, so a number at the end of a tensor has other bits than one in its middle. Ranks divide tensors, so
# here each number is part of a whole vector.
VECTOR = 16
EPSILON = 1e-8


# Numbers whose quantized moments are in fp32 at a time: few enough for the processor's cache.
PIECE = 1 << 18


@dataclass
class Moments:
    """The state of one parameter."""

    exp_avg: Tensor | QuantizedMoment
    exp_avg_sq: Tensor | QuantizedMoment
    step: Tensor  # number of steps, a scalar in fp32


class Operands(NamedTuple):
    """Flat fp32 tensors of one call of AdamW's kernel; it changes all but the gradient."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over fp32 tensors by name."""

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        betas: tuple[float, float],
        decay: Mapping[str, float],
        blocks: Mapping[str, int] | None = None,
    ) -> None:
        """`decay` has the weight decay of every tensor; `blocks` the numbers of a block of quantized moments."""
        self.masters, self.betas, self.decay, self.blocks = masters, betas, decay, blocks or {}
        self.moments: dict[str, Moments] = {}  # of the tensors that have had a gradient
        self.fused = all(master.device.type in ("cpu", "cuda") for master in masters.values())

    def step(self, learning_rate: float) -> None:
        """Apply the gradients of the tensors that have one."""
        names = [name for name, master in self.masters.items() if master.grad is not None]
        for name in names:
            if name not in self.moments:
                self.set_moments(name, self._zeros(name, signed=True), self._zeros(name, signed=False), 0)
        for decay in {self.decay[name] for name in names}:
            chosen = [name for name in names if self.decay[name] == decay]
            whole = [self._operands(name) for name in chosen if name not in self.blocks]
            if whole:
                self._apply(whole, learning_rate, decay)
            for name in chosen:
                if name in self.blocks:
                    self._apply_to_quantized(name, learning_rate, decay)

    def _zeros(self, name: str, *, signed: bool) -> Tensor | QuantizedMoment:
        master = self.masters[name].detach()
        if name in self.blocks:
            return QuantizedMoment.zeros(master, self.blocks[name], signed=signed)
        return torch.zeros_like(master)

    def set_moments(
        self, name: str, exp_avg: Tensor | QuantizedMoment, exp_avg_sq: Tensor | QuantizedMoment, step: int
    ) -> None:
        """Set the state of a tensor."""
        # The fused kernels need the step count on the weights' device, the others on the CPU.
        where = self.masters[name].device if self.fused else torch.device("cpu")
        self.moments[name] = Moments(exp_avg, exp_avg_sq, torch.tensor(step, dtype=torch.float32, device=where))

    def _operands(self, name: str) -> Operands:
        master, moments = self.masters[name], self.moments[name]
        assert master.grad is not None
        assert isinstance(moments.exp_avg, Tensor)
        assert isinstance(moments.exp_avg_sq, Tensor)
        return Operands(
            master.detach().view(-1),
            master.grad.view(-1),
            moments.exp_avg.view(-1),
            moments.exp_avg_sq.view(-1),
            moments.step,
        )

    def _apply_to_quantized(self, name: str, learning_rate: float, decay: float) -> None:
        """The step of a tensor with quantized moments, some rows at a time."""
        master, moments = self.masters[name], self.moments[name]
        assert master.grad is not None
        assert isinstance(moments.exp_avg, QuantizedMoment)
        assert isinstance(moments.exp_avg_sq, QuantizedMoment)
        rows, before = max(PIECE // math.prod(master.shape[1:]), 1), moments.step.clone()
        for first in range(0, len(master), rows):
            part = slice(first, first + rows)
            exp_avg, exp_avg_sq = moments.exp_avg.read(part), moments.exp_avg_sq.read(part)
            moments.step.copy_(before)
            weight, gradient = master.detach()[part].view(-1), master.grad[part].view(-1)
            self._apply([Operands(weight, gradient, exp_avg, exp_avg_sq, moments.step)], learning_rate, decay)
            moments.exp_avg.write(part, exp_avg)
            moments.exp_avg_sq.write(part, exp_avg_sq)
        moments.step.copy_(before + 1)  # a rank may have no row of the tensor

    def _apply(self, operands: Sequence[Operands], learning_rate: float, decay: float) -> None:
        pieces: list[Sequence[Tensor]] = []
        ends: list[tuple[list[Tensor], list[Tensor]]] = []
        for one in operands:
            *flat, step = one
            numbers = one.weight.numel()
            whole = numbers // VECTOR * VECTOR
            count = step.clone()
            if whole:
                pieces.append([*(part[:whole] for part in flat), step])
            if whole < numbers:
                end = [part[whole:] for part in flat]
                padded = [torch.nn.functional.pad(part, (0, VECTOR - len(part))) for part in end]
                ends.append((end, padded))
                pieces.append([*padded, count if whole else step])
        weights, gradients, means, squares, steps = (list(column) for column in zip(*pieces, strict=True))
        adamw(
            weights, gradients, means, squares, [], steps, fused=self.fused, amsgrad=False, beta1=self.betas[0],
            beta2=self.betas[1], lr=learning_rate, weight_decay=decay, eps=EPSILON, maximize=False,
        )  # fmt: skip
        for end, padded in ends:
            for part, computed in zip(end, padded, strict=True):
                part.copy_(computed[: len(part)])


LONGEST_BLOCK, SHORTEST_BLOCK = 256, 32
FEWEST_NUMBERS = 4096  # smaller tensors, such as the weights of norms, keep fp32 moments
DECADES = 7  # powers of ten that the codes cover
TINY = torch.finfo(torch.float32).tiny
BITS_OF_TABLE = 16


def block_length(shape: Sequence[int]) -> int | None:
    """Numbers of a block in a tensor of this shape: the largest divisor of a row's length up to 256.

    None: its moments stay in fp32, because it is small, a vector, or has no divisor of at least 32.
    """
    row = math.prod(shape[1:])
    if len(shape) < 2 or math.prod(shape) < FEWEST_NUMBERS:
        return None
    return next((length for length in range(LONGEST_BLOCK, SHORTEST_BLOCK - 1, -1) if row % length == 0), None)


def moment_bytes(parameters: int) -> int:
    """Bytes of one moment of a model with so many parameters, all of them in blocks of the full length."""
    return parameters + parameters // LONGEST_BLOCK * torch.float32.itemsize


def dynamic_map(*, signed: bool) -> Tensor:
    """The values of the 256 codes in ascending order (appendix of arXiv 1511.04561, as in arXiv 2110.02861).

    The decade that ends at 10^-k has 2^(6 - k) values (twice as many if there are no negative ones) in the middle of
    equal intervals; in addition there are 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade + (0 if signed else 1))
        borders = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        middles = (borders[:-1] + borders[1:]) / 2 * 10.0 ** (decade - DECADES + 1)
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64).float()


@dataclass(frozen=True)
class _Codec:
    values: Tensor  # of the codes
    borders: Tensor  # [256]: the code is rounded up from here; inf for the last
    lowest: Tensor  # [65536] int32: the code of the smallest number with these upper 16 bits


@cache
def _codec(signed: bool, device: torch.device) -> _Codec:
    values = dynamic_map(signed=signed)
    borders = torch.cat([(values[1:] + values[:-1]) / 2, torch.tensor([torch.inf])])
    # Numbers with the same upper 16 bits lie so close together that at most one border is between them.
    upper = torch.arange(1 << BITS_OF_TABLE, dtype=torch.int64)
    lower = torch.where(upper >= 1 << (BITS_OF_TABLE - 1), (1 << BITS_OF_TABLE) - 1, 0)
    bits = ((upper << BITS_OF_TABLE) | lower).to(torch.uint32).view(torch.float32)
    lowest = torch.bucketize(bits.nan_to_num(nan=0.0), borders[:-1], right=True, out_int32=True)
    return _Codec(values.to(device), borders.to(device), lowest.to(device))


class QuantizedMoment:
    """A moment of some rows in 8 bits."""

    def __init__(self, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        """`codes`: uint8, R rows of any shape; `scales_RB`: fp32."""
        self.codes, self.scales, self.signed = codes, scales, signed

    @classmethod
    def zeros(cls, like: Tensor, length: int, *, signed: bool) -> QuantizedMoment:
        """Zeros for the rows of `like`, in blocks of `length` numbers."""
        blocks = math.prod(like.shape[1:]) // length
        codec = _codec(signed, like.device)
        zero = int((codec.values == 0).nonzero())
        codes = torch.full(like.shape, zero, dtype=torch.uint8, device=like.device)
        return cls(codes, torch.zeros(len(like), blocks, device=like.device), signed=signed)

    def read(self, rows: slice) -> Tensor:
        """The values of some rows in fp32, [N]."""
        values = _codec(self.signed, self.codes.device).values
        scales = self.scales[rows].reshape(-1, 1)
        decoded = values.index_select(0, self.codes[rows].reshape(-1).int())
        return decoded.view(len(scales), -1).mul_(scales).view(-1)

    def write(self, rows: slice, values: Tensor) -> None:
        """Replace some rows by the nearest values of the codes; `values`: fp32, [N]."""
        codec = _codec(self.signed, self.codes.device)
        scales = self.scales[rows]
        blocks = values.view(scales.numel(), -1)
        largest = blocks.abs().amax(dim=1)
        scales.copy_(largest.view_as(scales))
        scaled = (blocks / largest.clamp_(min=TINY)[:, None]).view(-1)
        upper = (scaled.view(torch.int32) >> BITS_OF_TABLE) & ((1 << BITS_OF_TABLE) - 1)
        codes = codec.lowest.index_select(0, upper)
        codes += scaled >= codec.borders.index_select(0, codes)
        if not self.signed:
            torch.where(values > 0, codes.clamp(min=1), codes, out=codes)
        part = self.codes[rows]
        part.copy_(codes.view(part.shape))


# ---- moving averages of weights ----


class EMAWeights(ReferenceUpdater):
    """A copy of a module's weights, or their exponential moving average.

        weight += fraction * (leader's weight - weight)

    A moving average is stored in fp32, which takes 4 bytes per weight beside a module of lower precision. In bf16, with
    its 8 significant bits, a small fraction of a small difference would be rounded to 0 and the reference would not
    change. A copy (`fraction` = 1) needs no memory beside the module.
    """

    def __init__(
        self, module: nn.Module, leader: nn.Module, fraction: float, *, every: int = 1, division: Weights = WHOLE
    ) -> None:
        """
        Args:
            module: the reference; its parameters require no gradient.
            leader: the policy, a module with the same parameters.
            fraction: above 0; 1 copies the weights.
            every: number of steps between updates.
            division: of the module's weights among the ranks; the leader's are divided in the same way.
        """
        self.fraction, self.every, self.division = fraction, every, division
        self.parameters = dict(module.named_parameters())
        self.leader = dict(leader.named_parameters())
        assert self.parameters.keys() == self.leader.keys()
        self.weights: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            exact = parameter.dtype if fraction == 1 else torch.promote_types(parameter.dtype, torch.float32)
            self.weights[name] = parameter.detach().to(exact)  # the parameter itself, if it is precise enough

    def after(self, step: int) -> None:
        """Update the weights if `step` is a multiple of `every`."""
        if step % self.every == 0:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Interpolate between the weights and the leader's."""
        for name, weight in self.weights.items():
            # The leader's master weights, if they are sharded, are rounded as the weights are that it computes with.
            leader = self.leader[name].detach().to(self.parameters[name].dtype).to(weight.dtype)
            weight.copy_(leader) if self.fraction == 1 else weight.lerp_(leader, self.fraction)
        self._copy_to_module()

    def state_dict(self) -> dict[str, Any]:
        """The weights by parameter name, not copied."""
        return dict(self.weights)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved weights, bit for bit.

        Raises:
            ConfigError: if their names or shapes are not those of the module.
        """
        shapes = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        if shapes != {name: tuple(weight.shape) for name, weight in state.items()}:
            raise ConfigError(
                "the saved reference belongs to another model: resume with the model that the run began with"
            )
        for name, weight in self.weights.items():
            local(weight).copy_(own_rows(state[name], weight))
        self._copy_to_module()

    def _copy_to_module(self) -> None:
        for name, parameter in self.parameters.items():
            if local(parameter).data_ptr() != local(self.weights[name]).data_ptr():
                parameter.copy_(self.weights[name])
        self.division.reshard()
