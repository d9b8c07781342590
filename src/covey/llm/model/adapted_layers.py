"""Linear layers with a low-rank adapter (LoRA, arXiv 2106.09685): y = x W' + b + s (x A') B' with s = alpha / rank.

peft wraps the frozen layer; its adapters have names. Nothing here imports peft, so all code may ask for a layer's
weights, with or without an adapter.

Shapes: N inputs and M outputs of a layer, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")

MERGED_ROWS = 256  # rows of a weight that are merged with an adapter at a time


class Factors(NamedTuple):
    """The adapter that a layer uses at present."""

    a_RN: Tensor
    b_MR: Tensor
    scaling: float


def is_adapted(layer: nn.Module) -> bool:
    """True for a layer of peft around a frozen linear layer."""
    return hasattr(layer, "base_layer")


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The adapted layers of a model by path."""
    return {path: layer for path, layer in module.named_modules() if is_adapted(layer)}


def base_of(layer: Any) -> Any:
    """The layer without its adapter."""
    return getattr(layer, "base_layer", layer)


def factors_of(layer: Any) -> Factors | None:
    """The adapter that a layer uses at present; None if it has none, or adapters are off."""
    if not is_adapted(layer) or layer.disable_adapters:
        return None
    (name,) = layer.active_adapters
    return Factors(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Context manager after which a module uses the adapter that it used before."""
    before = _selection(module)
    try:
        yield
    finally:
        _select(before)


def with_present_adapter(module: nn.Module, compute: Callable[P, T]) -> Callable[P, T]:
    """`compute`, which reads the module, with the adapter that the module uses now, at whatever time it is called.

    A backward pass computes parts of a forward pass again, and the module may use another adapter then.
    """
    present = _selection(module)
    if not present:
        return compute

    def computed(*arguments: P.args, **options: P.kwargs) -> T:
        with restored(module):
            _select(present)
            return compute(*arguments, **options)

    return computed


Selection = list[tuple[Any, Any, bool]]  # a layer, the names of its adapters in use, whether adapters are off


def _selection(module: nn.Module) -> Selection:
    layers = adapted_layers(module).values()
    return [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]


def _select(selection: Selection) -> None:
    # peft's own methods set `requires_grad` too, on which optimizers and autograd's graphs rely.
    for layer, active, off in selection:
        layer._active_adapter, layer._disable_adapters = active, off


def merged_weight(layer: Any, whole: Tensor | None = None) -> Tensor:
    """W + s B A, computed in fp32 and rounded once; W itself without an adapter. It is [N, M] if W is (GPT-2).

    `whole` is W if the layer has only this rank's rows of it.
    """
    weight: Tensor = base_of(layer).weight.detach() if whole is None else whole
    if factors_of(layer) is None:
        return weight
    merged = torch.empty_like(weight)
    _merge(merged, weight, layer)
    return merged


def joined_weights(*layers: Any) -> Tensor:
    """The concatenated weights [M, N] of linear layers with the same inputs, merged with their adapters.

    Only tensors of a few MB are allocated beside the result, because copies of whole weights leave holes in the heap. A
    single weight without an adapter is not copied: that of an output layer may be as large as ten other layers.
    """
    weights = [base_of(layer).weight.detach() for layer in layers]
    if len(layers) == 1 and factors_of(layers[0]) is None:
        return weights[0]
    joined = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1])
    for part, weight, layer in zip(joined.split([len(weight) for weight in weights]), weights, layers, strict=True):
        _merge(part, weight, layer)
    return joined


@torch.no_grad()
def _merge(merged: Tensor, weight: Tensor, layer: Any) -> None:
    """Write W + s B A to `merged`, MERGED_ROWS rows at a time; W without an adapter."""
    factors = factors_of(layer)
    if factors is None:
        merged.copy_(weight)
        return
    exact = torch.promote_types(weight.dtype, torch.float32)
    a_RN, b_MR = (factor.detach().to(exact) for factor in factors[:2])
    left, right = (a_RN.T, b_MR.T) if layer.fan_in_fan_out else (b_MR, a_RN)
    for begin in range(0, len(weight), MERGED_ROWS):
        rows = slice(begin, begin + MERGED_ROWS)
        merged[rows] = torch.add(weight[rows].to(exact), left[rows] @ right, alpha=factors.scaling)


def merged_tensors(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of a model by name, and their names, as they are after its adapter was merged into them. The
    weights of one layer at a time are computed.
    """
    layers = adapted_layers(module)
    for name, tensor in tensors:
        path, _, field = name.rpartition(".base_layer.")
        if path in layers:
            yield f"{path}.{field}", merged_weight(layers[path], tensor) if field == "weight" else tensor
        elif not _is_factor(name, layers):
            yield name, tensor


def base_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model without its adapters, and their names without them."""
    layers = adapted_layers(module)
    for name, parameter in module.named_parameters():
        path, _, field = name.rpartition(".base_layer.")
        if not _is_factor(name, layers):
            yield f"{path}.{field}" if path in layers else name, parameter


def all_factors(module: nn.Module) -> set[nn.Parameter]:
    """The matrices A and B of all adapters of a model."""
    layers = adapted_layers(module)
    return {parameter for name, parameter in module.named_parameters() if _is_factor(name, layers)}


def _is_factor(name: str, layers: Mapping[str, Any]) -> bool:
    return name.partition(".lora_")[0] in layers
