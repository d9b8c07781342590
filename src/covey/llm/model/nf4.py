"""Linear layers with frozen weights in 4 bits: NormalFloat4 with double quantization (QLoRA, arXiv 2305.14314), by
bitsandbytes.

A block of 64 weights has 4 bits for each and one scale; the scales of 256 blocks have 8 bits each and one scale. A
layer computes with the weights that these stand for, in the dtype in which the model was loaded: whoever reads
`weight`, such as a decoder that copies or merges it, gets the same numbers as the forward and the backward pass.

Shapes: M outputs, N inputs.
"""

import logging
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covey.config.model_sources import check_four_bit

BLOCK, SCALES = 64, 256  # weights with one scale, scales with one scale
PACKED = "packed"  # name of the parameter in place of the weight


def packed_bytes(weights: int) -> int:
    """Bytes of so many weights and of their scales."""
    return weights // 2 + weights // BLOCK + weights // (BLOCK * SCALES) * 4


class NF4Linear(nn.Linear):
    """x -> x W' + b with W in NF4, for a frozen layer."""

    like: Tensor  # empty, of the dtype of the weights; converted with the tensors of the model

    def __init__(self, layer: nn.Linear, device: torch.device, checksum: str) -> None:
        """
        Args:
            layer: the layer to quantize, whose bias is kept.
            device: where it is quantized and computes.
            checksum: of its weight before.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.checksum = layer.in_features, layer.out_features, checksum
        weight = layer.weight.detach().to(device)
        # One row of whole blocks: on a CPU bitsandbytes 0.50 takes wrong scales if a block crosses the end of a row.
        row = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK))
        packed, self.state = _functional().quantize_4bit(
            row, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("like", weight.new_empty(0), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A new tensor [M, N] with the weights that the 4 bits stand for."""
        row: Tensor = _functional().dequantize_4bit(self.packed.detach(), self.state)
        numbers = self.out_features * self.in_features
        return row.flatten()[:numbers].view(self.out_features, self.in_features).to(self.like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self)

    def dense(self, weight_MN: Tensor) -> nn.Linear:
        """A layer with the same bias and another weight."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight, layer.bias = nn.Parameter(weight_MN), self.bias
        return layer


def stored(layer: nn.Linear) -> Tensor:
    """A tensor with the dtype and device of a layer's weight, which is not computed."""
    return layer.like if isinstance(layer, NF4Linear) else layer.weight


class _Product(torch.autograd.Function):
    """x W' + b. The backward pass computes W again, and has a gradient of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return d @ ctx.layer.weight, None


def _functional() -> Any:
    """bitsandbytes.functional, imported at first use, because it is an extra and takes a second."""
    check_four_bit()
    logger, level = logging.getLogger("bitsandbytes"), logging.getLogger("bitsandbytes").level
    logger.setLevel(logging.ERROR)  # it warns of a missing package whose kernel is not used
    try:
        return import_module("bitsandbytes.functional")
    finally:
        logger.setLevel(level)
