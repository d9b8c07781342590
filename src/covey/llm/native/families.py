"""Which models the kernels can decode: Llama-like ones."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

# Their layers: norm, attention with rotary positions, norm, gated SiLU. Nothing is scaled or capped.
FAMILIES = ("llama", "qwen2", "qwen3")


def is_llama_like(module: PreTrainedModel) -> bool:
    """Whether the model is built as `NativeDecoder` takes it to be."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        and len({parameter.dtype for parameter in module.parameters()}) == 1  # the kernels are told one type
        and all(type(layer) is nn.Linear for layer in module.modules() if hasattr(layer, "in_features"))
    )
