"""Weights in the order in which oneDNN multiplies few rows fastest.

Decoding multiplies few rows by every weight, so that reading the weights is much of the work. The copy takes as much
memory as the weights and a tenth of a second; it is made anew for every decoder, lives as long as one, and so is never
out of date.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn

ROWS = 64  # that the order is chosen for; it serves any number


def packs(weight: Tensor) -> bool:
    """Whether oneDNN has an order of its own for this weight, on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linear layers with the same input, one behind the other."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return torch.cat(weights).detach(), torch.cat(biases).detach() if biases else None


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    """The layers whose weights decoding on a CPU copies."""
    return [layer for layer in module.modules() if type(layer) is nn.Linear]


def copy_bytes(weights: int, itemsize: int, device: str) -> int:
    """Bytes of the prepacked copy of `weights` numbers of `itemsize` bytes; 0 if the device is not "cpu"."""
    return weights * itemsize if device == "cpu" else 0


class PackedLinear:
    """x -> x W' + b of one or several linear layers with the same input, side by side."""

    def __init__(self, *layers: nn.Linear) -> None:
        weight, self.bias = joined(*layers)
        self.packs = packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self.packs else weight

    def __call__(self, x_RW: Tensor) -> Tensor:
        if self.packs:
            return torch.ops.mkldnn._linear_pointwise(x_RW, self.weight, self.bias, "none", [], "")
        return nn.functional.linear(x_RW, self.weight, self.bias)


class PackedLinears:
    """Inside `with`, the linear layers of a module multiply by packed weights, where that is possible."""

    def __init__(self, module: nn.Module) -> None:
        self.packed = {layer: PackedLinear(layer) for layer in linear_layers(module) if packs(layer.weight)}

    def __enter__(self) -> None:
        for layer, packed in self.packed.items():
            layer.forward = packed  # type: ignore[assignment]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for layer in self.packed:
            del layer.forward
