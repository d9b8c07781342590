"""AdamW whose result for a number does not depend on the other numbers of its tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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
