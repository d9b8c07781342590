"""The weights of a Llama-like decoder, as NativeDecoder wants them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.packed import PackedLinear

# Their layers: norm, attention with rotary positions, norm, gated SiLU. Nothing is scaled or capped.
FAMILIES = ("llama", "qwen2", "qwen3")


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


def is_llama_like(module: PreTrainedModel) -> bool:
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
