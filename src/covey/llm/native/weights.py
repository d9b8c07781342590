"""The weights of a Llama-like decoder as the matrix products of decoding want them.

Decoding multiplies few rows by every weight, so that reading the weights is much of the work. oneDNN reads them faster
in an order of its own. The copy takes as much memory as the weights and a tenth of a second; it is made anew for every
decoder, lives as long as one, and so is never out of date.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Their layers: norm, attention with rotary positions, norm, gated SiLU. Nothing is scaled or capped.
FAMILIES = ("llama", "qwen2", "qwen3")
ROWS = 64  # that the order is chosen for; it serves any number


class PackedLinear:
    """x -> x W' + b of one or several linear layers with the same input, side by side."""

    def __init__(self, *layers: nn.Linear) -> None:
        weights: list[Tensor] = [layer.weight for layer in layers]
        weight = torch.cat(weights).detach()
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases).detach() if biases else None
        self.packs = torch.backends.mkldnn.is_available()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self.packs else weight

    def __call__(self, x_RW: Tensor) -> Tensor:
        if self.packs:
            return torch.ops.mkldnn._linear_pointwise(x_RW, self.weight, self.bias, "none", [], "")
        return nn.functional.linear(x_RW, self.weight, self.bias)


@dataclass(frozen=True)
class PackedLayer:
    """One decoder layer."""

    input_norm: Tensor
    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    inner_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


def can_be_packed(module: PreTrainedModel) -> bool:
    """Whether the model is built as `pack` and `NativeDecoder` take it to be."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        and len({parameter.dtype for parameter in module.parameters()}) == 1  # the kernels are told one type
        and all(type(layer) is nn.Linear for layer in module.modules() if hasattr(layer, "in_features"))
    )


def pack(layer: Any) -> PackedLayer:
    """A decoder layer of transformers, packed."""
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return PackedLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=None if query_norm is None else query_norm.weight.detach(),
        key_norm=None if key_norm is None else key_norm.weight.detach(),
        output=PackedLinear(attention.o_proj),
        inner_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=PackedLinear(mlp.gate_proj, mlp.up_proj),
        down=PackedLinear(mlp.down_proj),
    )
