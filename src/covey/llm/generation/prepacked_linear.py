"""Linear layers with weights prepacked by oneDNN for products with few rows.

Decoding multiplies few rows by every weight, so reading the weights takes much of its time. The prepacked copy needs as
much memory as the weights and takes about 0.1 s. Every decoder makes a new copy, so it always has the current weights.
The adapter of a layer is merged into its copy.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn

from covey.llm.model.lora import adapted_layers, base_of, joined_weights

ROWS = 64  # number of rows for which oneDNN chooses the memory format; other numbers work too


def packs(weight: Tensor) -> bool:
    """True if oneDNN can prepack this weight on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Concatenated weights, merged with their adapters, and biases of linear layers with the same input."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return joined_weights(*layers), torch.cat(biases).detach() if biases else None


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    """The layers whose weights decoding on a CPU copies, adapted ones as a whole."""
    adapted = adapted_layers(module)
    inside = {id(part) for layer in adapted.values() for part in layer.modules() if part is not layer}
    linear = (part for part in module.modules() if type(base_of(part)) is nn.Linear and id(part) not in inside)
    return list(linear)  # type: ignore[arg-type]


def copy_bytes(weights: int, itemsize: int, device: str) -> int:
    """Bytes of the prepacked copy of `weights` numbers of `itemsize` bytes; 0 if the device is not "cpu"."""
    return weights * itemsize if device == "cpu" else 0


class PackedLinear:
    """x -> x W' + b for one or several linear layers with the same input; their outputs are concatenated."""

    def __init__(self, *layers: nn.Linear) -> None:
        weight, self.bias = joined(*layers)
        self.packs = packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self.packs else weight

    def __call__(self, x_RW: Tensor) -> Tensor:
        if self.packs:
            return torch.ops.mkldnn._linear_pointwise(x_RW, self.weight, self.bias, "none", [], "")
        return nn.functional.linear(x_RW, self.weight, self.bias)


class PackedLinears:
    """Context manager in which the linear layers of a module use prepacked weights if possible."""

    def __init__(self, module: nn.Module) -> None:
        self.packed = {layer: PackedLinear(layer) for layer in linear_layers(module) if packs(layer.weight)}

    def __enter__(self) -> None:
        for layer, packed in self.packed.items():
            layer.forward = packed  # type: ignore[assignment]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for layer in self.packed:
            del layer.forward
