"""The architecture of a model: the description of its layers for kernels, its attention heads, its limits."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.model.lora import NF4Linear, is_adapted


@dataclass(frozen=True)
class Family:
    """How the layers of a family differ from Llama's: RMSNorm, attention, RMSNorm, SwiGLU.

    Norms are names of a layer's modules; None: it has none there.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of what attention adds to the residual stream
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    offset: float = 0.0  # a norm multiplies by offset + weight
    has_window: bool = False  # every layer has the window of the config; else those that name one


_GEMMA = Family(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    offset=1.0,
)
_AFTER = Family(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "granite"), Family()),
    **dict.fromkeys(("mistral", "phi3"), Family(has_window=True)),
    **dict.fromkeys(("olmo2", "olmo3"), _AFTER),
    "gemma": Family(offset=1.0),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
}
ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # of the gate; True: GELU
PARTS = ("embed_tokens", "rotary_emb", "layers", "norm")  # of the decoder that kernels compute


class Feature(StrEnum):
    """What a layer or a model has and Llama has not."""

    WINDOW = "attention to a window"
    CAPPED = "capped attention scores or logits"
    GELU = "GELU"
    OFFSET = "norms that multiply by 1 + weight"
    AFTER = "norms after attention and MLP"
    WIDE = "norms over all heads"
    UNROTATED = "layers without rotary embeddings"
    SCALED = "scaled embeddings, scores, residuals or logits"
    ANGLES = "several rotary embeddings"


GPU_FEATURES = frozenset(Feature) - {Feature.CAPPED}  # that the kernels for GPUs compute


def is_llama_like(module: PreTrainedModel) -> bool:
    """True if the model has the layers that `LlamaLayers` and the kernels for CPUs compute."""
    return not obstacle(module, frozenset())


def obstacle(module: PreTrainedModel, supported: frozenset[Feature]) -> str:
    """What keeps kernels that compute these features from computing the model; empty if nothing does."""
    config, base = module.config.get_text_config(), module.base_model
    if config.model_type not in FAMILIES or not all(hasattr(base, name) for name in PARTS):
        return f"layers of the type {config.model_type}"
    if (activation := _activation(config)) not in ACTIVATIONS:
        return f"the activation {activation}"
    if others := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"layers of {min(others)}"
    rotary = getattr(config, "rope_parameters", None) or {}
    if any(
        part.get("partial_rotary_factor", 1.0) != 1.0 for part in (rotary, *rotary.values()) if isinstance(part, dict)
    ):
        return "rotary embeddings of a part of a head"
    if len({parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}) != 1:
        return "weights of several types"
    for layer in module.modules():
        if _is_linear(layer) and not (type(layer) in (nn.Linear, NF4Linear) or is_adapted(layer)):
            return f"layers of the class {type(layer).__name__}"
    return ", ".join(sorted(features_of(module) - supported))


def features_of(module: PreTrainedModel) -> frozenset[Feature]:
    """Those of a model of FAMILIES."""
    config, base = module.config.get_text_config(), cast(Any, module.base_model)
    layers = layers_of(module)
    head_width = Heads.of(module).width
    found = {
        Feature.WINDOW: any(layer.rule.window for layer in layers),
        Feature.CAPPED: any(getattr(config, f"{kind}_logit_softcapping", None) for kind in ("attn", "final")),
        Feature.GELU: any(layer.is_gelu for layer in layers),
        Feature.OFFSET: bool(FAMILIES[config.model_type].offset),
        Feature.AFTER: any(layer.attention_norm is not None for layer in layers),
        Feature.WIDE: any(layer.query_norm is not None and len(layer.query_norm) != head_width for layer in layers),
        Feature.UNROTATED: not all(layer.rule.rotates for layer in layers),
        Feature.SCALED: any((layer.residual_scale, layer.rule.scaling) != (1.0, head_width**-0.5) for layer in layers)
        or logit_scale(module) != 1.0
        or embedding_scale(module) != 1.0,
        Feature.ANGLES: hasattr(base.rotary_emb, "layer_types"),
    }
    return frozenset(feature for feature, has in found.items() if has)


def layers_of(module: PreTrainedModel) -> list[LayerModules]:
    """The layers of a model of FAMILIES."""
    return [LayerModules.of(layer) for layer in cast(Any, module.base_model).layers]


def logit_scale(module: PreTrainedModel) -> float:
    """The logits are the output layer's results divided by this."""
    return float(getattr(module.config.get_text_config(), "logits_scaling", 1.0))


def embedding_scale(module: PreTrainedModel) -> float:
    """The residual stream begins with the embeddings times this, besides what the embedding itself multiplies by."""
    return float(getattr(module.base_model, "embedding_multiplier", 1.0))


def norm_epsilon(norm: Any) -> float:
    """The number that an RMSNorm of transformers adds to the mean square."""
    found: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return found


def norm_scale(norm: Any, offset: float) -> Tensor:
    """What an RMSNorm multiplies by, in fp32 if that is not its weight alone."""
    scale: Tensor = offset + norm.weight.float() if offset else norm.weight
    return scale


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


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
class AttentionRule:
    """What the attention of a layer does with queries and keys."""

    scaling: float  # of the scores
    window: int = 0  # a token attends to the last tokens, so many with itself; 0: to all
    rotates: bool = True  # by rotary embeddings
    angles: str = ""  # which ones, if the model has several

    @classmethod
    def of(cls, attention: Any) -> AttentionRule:
        """That of one of transformers' attention modules."""
        config, family = attention.config, FAMILIES[attention.config.model_type]
        window = config.sliding_window if family.has_window else getattr(attention, "sliding_window", None)
        if window and window >= (position_limit(config) or sys.maxsize):
            window = None
        kind = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None) or ""
        return cls(attention.scaling, window or 0, bool(getattr(attention, "use_rope", True)), kind)


@dataclass(frozen=True)
class LayerModules:
    """The modules of one of transformers' decoder layers. Linear layers may be adapted (`adapted_layers`).

    Of a norm, what it multiplies by; None: the layer has none there.
    """

    input_norm: Any  # before attention
    qkv: list[nn.Linear]
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: nn.Linear
    attention_norm: Tensor | None  # of what attention adds
    inner_norm: Any  # before the MLP
    gate_up: list[nn.Linear]
    down: nn.Linear
    mlp_norm: Tensor | None  # of what the MLP adds
    rule: AttentionRule
    is_gelu: bool
    residual_scale: float  # of what is added to the residual stream

    @classmethod
    def of(cls, layer: Any) -> LayerModules:
        attention, mlp = layer.self_attn, layer.mlp
        family = FAMILIES[attention.config.model_type]

        def scale(part: Any, name: str | None) -> Tensor | None:
            norm = getattr(part, name, None) if name else None
            return None if norm is None else norm_scale(norm, family.offset).detach()

        return cls(
            input_norm=scale(layer, family.before_attention),
            qkv=qkv_of(attention),
            query_norm=scale(attention, "q_norm"),
            key_norm=scale(attention, "k_norm"),
            output=attention.o_proj,
            attention_norm=scale(layer, family.after_attention),
            inner_norm=scale(layer, family.before_mlp),
            gate_up=gate_up_of(mlp),
            down=mlp.down_proj,
            mlp_norm=scale(layer, family.after_mlp),
            rule=AttentionRule.of(attention),
            is_gelu=is_gelu(attention.config),
            residual_scale=residual_scale(layer),
        )


def qkv_of(attention: Any) -> list[nn.Linear]:
    """The linear layers of queries, keys and values: one for each, or a joined one."""
    return _one_or_each(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))


def gate_up_of(mlp: Any) -> list[nn.Linear]:
    """The linear layers of the gate and of what it multiplies: one for each, or a joined one."""
    return _one_or_each(mlp, "gate_up_proj", ("gate_proj", "up_proj"))


def _one_or_each(part: Any, one: str, each: tuple[str, ...]) -> list[nn.Linear]:
    return [getattr(part, one)] if hasattr(part, one) else [getattr(part, name) for name in each]


def is_gelu(config: Any) -> bool:
    """Whether the gate is GELU, by its approximation with tanh; else it is SiLU."""
    return ACTIVATIONS.get(_activation(config), False)


def residual_scale(layer: Any) -> float:
    """What a layer adds to the residual stream is multiplied by this."""
    return float(getattr(layer, "residual_multiplier", 1.0))


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
