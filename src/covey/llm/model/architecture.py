"""The architecture of a model: whether it is Llama-like, its attention heads, the modules of a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.model.lora import is_adapted
from covey.llm.model.nf4 import NF4Linear

# Layers of RMSNorm, attention with rotary embedding, RMSNorm, SwiGLU, without scaling or capping.
FAMILIES = ("llama", "qwen2", "qwen3")


def is_llama_like(module: PreTrainedModel) -> bool:
    """True if the model has the layers that `LlamaLayers` and `NativeDecoder` compute."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        # The kernels support one type per model.
        and len({parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}) == 1
        and all(
            type(layer) in (nn.Linear, NF4Linear) or is_adapted(layer)
            for layer in module.modules()
            if _is_linear(layer)
        )
    )


def _is_linear(layer: nn.Module) -> bool:
    return hasattr(layer, "in_features")


# Config fields of attention windows and chunks.
_LIMITS_ATTENTION = re.compile(r"window|chunk|local|block|index|budget|sparse|compress|span|stride")


def windows_of(config: Any) -> list[int]:
    """All window and chunk lengths in a config, in tokens.

    It may include numbers with another meaning, because a longer trial than needed is not an error.
    """
    return sorted({size for size in _windows(config.to_dict(), named=False) if size > 0})


def _windows(fields: dict[Any, Any], *, named: bool) -> Iterator[int]:
    for name, value in fields.items():
        limits = named or bool(_LIMITS_ATTENTION.search(str(name)))
        if isinstance(value, dict):
            yield from _windows(value, named=limits)
        elif limits and type(value) is int and "layer" not in str(name) and "expert" not in str(name):
            yield value


def vocabulary_of(module: PreTrainedModel) -> int:
    """Number of tokens that may be fed."""
    table: Any = module.get_input_embeddings()
    return int(table.weight.shape[0])


def exact_length(config: Any) -> tuple[int, str] | None:
    """Longest row in tokens that does not depend on the other rows of its batch, and the reason; None without a limit.

    Two kinds of rotary scaling choose the frequencies of all rows by the longest row of a call. Attention that selects
    the keys with the highest scores depends on rounding if scores are equal.
    """
    config = config.get_text_config()
    named = getattr(config, "rope_parameters", None) or {}
    kinds = [part for part in named.values() if isinstance(part, dict)] or [named]
    limits: list[tuple[int, str]] = []
    for kind in kinds:
        limit = position_limit(config)
        if kind.get("rope_type") == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            limit = kind.get("original_max_position_embeddings") or original or limit
        if kind.get("rope_type") in ("longrope", "dynamic") and limit:
            limits.append((int(limit), "its rotary scaling depends on the longest row that is computed with it"))
    for field in ("index_topk", "indexer_budget"):
        if count := getattr(config, field, None):
            limits.append((int(count), "its attention selects keys by scores, of which several may be equal"))
    return min(limits, default=None)


@dataclass(frozen=True)
class Heads:
    """Number and width of a model's attention heads."""

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
class LayerModules:
    """The modules of one of transformers' decoder layers. Linear layers may be adapted (`adapted_layers`)."""

    input_norm: Tensor
    qkv: list[nn.Linear]
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: nn.Linear
    inner_norm: Tensor
    gate_up: list[nn.Linear]
    down: nn.Linear

    @classmethod
    def of(cls, layer: Any) -> LayerModules:
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


# Config fields for the number of positions, the usual name first.
POSITION_FIELDS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length", "max_target_positions",
    "seq_length", "model_max_length",
)  # fmt: skip


def position_limit(config: Any) -> int | None:
    """Longest sequence that a model takes, in tokens; None if its config names no limit."""
    text = config.get_text_config()
    limits = (getattr(text, name, None) for name in POSITION_FIELDS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def longest_row(config: Any) -> int | None:
    """Longest row in tokens within both `position_limit` and `exact_length`; None without a limit."""
    exact = exact_length(config)
    return shortest(position_limit(config), None if exact is None else exact[0])


def shortest(*limits: int | None) -> int | None:
    """The lowest limit; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
