"""How much memory a run will need, from a model's dimensions alone: no weight is read.

`covey check` prints it. It is an estimate: prompts are taken to be `PROMPT_TOKENS` long and completions to use the
whole token limit, and what the allocator keeps in reserve is not counted.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config import EMBEDDED_MODELS, ConfigError, RunConfig

PROMPT_TOKENS = 64
PROGRAM_BYTES = 600 << 20  # Python, torch and transformers before any weight
CACHE_BYTES = 2 << 30  # what the sampler gives to keys and values where rows_at_once is 0
LOGIT_CHUNK = 512  # decisions whose logits exist at a time
# What autograd keeps beyond the tensors counted in `_activation_bytes` (padding, rotary parts, masks): measured on
# smollm2-135m in bf16 with 12 to 96 new tokens, where the count alone gives between 0.83 and 1.06 of the truth.
ACTIVATION_SLACK = 1.1

SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}

# Other names that `config.json` files have for the same dimension.
ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions",),
}
UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "bloom", "falcon")  # two matrices, not three
LEARNED_POSITIONS = ("gpt2", "gpt_neo", "opt")


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a decoder that its memory follows from."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int  # rows of a learned position table; 0 where positions are rotated
    is_gated: bool
    is_tied: bool

    @property
    def parameters(self) -> int:
        """Number of weights, biases left out (they are below one in a thousand)."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key_value)
        feed_forward = (3 if self.is_gated else 2) * self.hidden * self.intermediate
        tables = self.vocabulary * (1 if self.is_tied else 2) + self.positions
        return self.layers * (attention + feed_forward + 2 * self.hidden) + self.hidden * (tables + 1)


def read_dimensions(model_config: dict[str, Any]) -> Dimensions:
    """The dimensions in the dict of a `config.json`; a model with pictures or sound counts its text part only.

    Raises:
        ConfigError: if the dict lacks a dimension.
    """
    config = {**model_config, **model_config.get("text_config", {})}

    def get(name: str, default: int | None = None) -> int:
        for alias in (name, *ALIASES.get(name, ())):
            if isinstance(config.get(alias), int):
                return int(config[alias])
        if default is None:
            raise ConfigError(f"the model's config.json has no {name}, so its memory cannot be estimated")
        return default

    hidden, heads, kind = get("hidden_size"), get("num_attention_heads"), config.get("model_type", "")
    return Dimensions(
        hidden=hidden,
        layers=get("num_hidden_layers"),
        heads=heads,
        kv_heads=get("num_key_value_heads", heads),
        head_dim=get("head_dim", hidden // heads),
        intermediate=get("intermediate_size", 4 * hidden),
        vocabulary=get("vocab_size"),
        positions=get("max_position_embeddings", 0) if kind in LEARNED_POSITIONS else 0,
        is_gated=kind not in UNGATED,
        is_tied=bool(config.get("tie_word_embeddings", kind in LEARNED_POSITIONS)),
    )


def estimate_memory(model_config: dict[str, Any], run_config: RunConfig) -> dict[str, int]:
    """Bytes by part, each at its own largest; `peak_memory` adds up those that live at the same time.

    Args:
        model_config: the dict of the model's `config.json`.
        run_config: what will be run. Precision `auto` counts as bf16.

    Raises:
        ConfigError: if the dict lacks a dimension.
    """
    size = read_dimensions(model_config)
    width = 4 if run_config.precision == "fp32" else 2  # bytes of a weight and of an activation
    sampling, update = run_config.sampling, run_config.update
    rollouts = sampling.prompts_per_step * sampling.group_size
    per_token = 2 * size.layers * size.kv_heads * size.head_dim * width
    rows = sampling.rows_at_once or max(CACHE_BYTES // (per_token * sampling.max_new_tokens), sampling.group_size)
    rows = min(rows, rollouts)
    prompts = -(-rows // sampling.group_size)
    step_tokens = sampling.prompts_per_step * PROMPT_TOKENS + rollouts * sampling.max_new_tokens
    fed = min(update.microbatch_tokens, -(-step_tokens // update.minibatches))
    chunk = min(LOGIT_CHUNK, fed)
    return {
        "program": PROGRAM_BYTES,
        "weights": size.parameters * width,
        "fp32 master weights": 0 if width == 4 else size.parameters * 4,
        "Adam's two moments": size.parameters * 8,
        "reference model": size.parameters * width,
        "keys and values while sampling": per_token * (rows * sampling.max_new_tokens + prompts * PROMPT_TOKENS),
        "gradients": size.parameters * 4,
        "activations of a microbatch": fed * _activation_bytes(size, width, sampling.max_new_tokens),
        # logits, probabilities and their gradient, and the output layer's gradient in fp32
        "logits of a chunk": 3 * 4 * chunk * size.vocabulary + 4 * size.hidden * size.vocabulary,
    }


def peak_memory(parts: dict[str, int]) -> int:
    """The most bytes held at one time: sampling and the update take turns, the rest stays."""
    sampling = ("keys and values while sampling",)
    update = ("gradients", "activations of a microbatch", "logits of a chunk")
    always = sum(size for name, size in parts.items() if name not in (*sampling, *update))
    return always + max(sum(parts[name] for name in sampling), sum(parts[name] for name in update))


def _activation_bytes(size: Dimensions, width: int, max_new_tokens: int) -> int:
    """What autograd keeps of one token through all layers."""
    query, key_value = size.heads * size.head_dim, size.kv_heads * size.head_dim
    norms = 2 * size.hidden * (4 + 2 * width)  # input in fp32, result, input of the next matrix
    attention = width * (2 * query + 2 * key_value)
    scores = size.heads * (PROMPT_TOKENS + max_new_tokens // 2) * (4 + width)
    feed_forward = width * size.intermediate * (4 if size.is_gated else 2)
    return int(ACTIVATION_SLACK * size.layers * (norms + attention + scores + feed_forward))


def find_model_config(model: str) -> dict[str, Any] | None:
    """The `config.json` of a model by the name that a recipe gives it; None where it is not on this machine yet."""
    if model in EMBEDDED_MODELS:
        return SMOLLM2_135M
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_config(path)
    files = [folder / "config.json" for folder in (path, path / "model")]
    if not path.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        files = [Path(cached)] if isinstance(cached, (str, os.PathLike)) else []
    for file in files:
        if file.is_file():
            try:
                config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{file} is no valid JSON: {error}") from error
            return config
    return None


def _gguf_config(path: Path) -> dict[str, Any]:
    """The dimensions in the head of a GGUF file, under the names of a `config.json`."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise ConfigError(f"{path} is no GGUF file: {error}") from error
    kind = reader.fields["general.architecture"].contents()
    names = {
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "context_length": "max_position_embeddings",
    }
    found = {ours: reader.get_field(f"{kind}.{theirs}") for theirs, ours in names.items()}
    config: dict[str, Any] = {name: int(field.contents()) for name, field in found.items() if field is not None}
    tensors = {tensor.name: tensor.shape for tensor in reader.tensors}
    config["vocab_size"] = int(tensors["token_embd.weight"][1])
    return config | {"model_type": kind, "tie_word_embeddings": "output.weight" not in tensors}
