"""What a model is built of: whether it is Llama-like, its attention heads, the parts of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

# Their layers: norm, attention with rotary positions, norm, gated SiLU. Nothing is scaled or capped.
FAMILIES = ("llama", "qwen2", "qwen3")


def is_llama_like(module: PreTrainedModel) -> bool:
    """Whether the model is built as `layers.py` and `NativeDecoder` take it to be."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        and len({parameter.dtype for parameter in module.parameters()}) == 1  # the kernels are told one type
        and all(type(layer) is nn.Linear for layer in module.modules() if hasattr(layer, "in_features"))
    )


@dataclass(frozen=True)
class Heads:
    """Of a model's attention: how many, and how wide."""

    queries: int
    keys: int
    width: int

    @classmethod
    def of(cls, module: PreTrainedModel) -> Heads:
        config = module.config.get_text_config()
        queries = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or queries
        return cls(queries, keys, getattr(config, "head_dim", None) or config.hidden_size // queries)


@dataclass(frozen=True)
class Parts:
    """What a decoder layer of transformers consists of."""

    input_norm: Tensor
    qkv: list[nn.Linear]
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: nn.Linear
    inner_norm: Tensor
    gate_up: list[nn.Linear]
    down: nn.Linear

    @classmethod
    def of(cls, layer: Any) -> Parts:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return cls(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=[attention.q_proj, attention.k_proj, attention.v_proj],
            query_norm=None if query_norm is None else query_norm.weight.detach(),
            key_norm=None if key_norm is None else key_norm.weight.detach(),
            output=attention.o_proj,
            inner_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=[mlp.gate_proj, mlp.up_proj],
            down=mlp.down_proj,
        )
