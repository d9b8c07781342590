"""Moments of AdamW in 8 bits: block-wise dynamic quantization (Dettmers et al., arXiv 2110.02861).

A moment is kept as a code of 8 bits for every number and one fp32 scale for every block of at most 256 numbers of a
row: the largest magnitude in the block. A code stands for one of 256 values between -1 and 1 (0 and 1 for squares),
whose relative spacing is about that of a float with 1 to 7 bits for the fraction.

The code of 0 is not used for a second moment above 0 (Li et al., arXiv 2309.01507): AdamW divides by its root, so a
small moment that became 0 would make a step of any size.

A row has the same codes in any part of a tensor, so ranks that divide the rows have the bits of one process.

Shapes: R rows, B blocks of a row, N numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

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
