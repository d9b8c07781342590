"""Reads the dimensions of a model from its `config.json` alone, without reading or allocating weights."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from covey.config import ConfigError
from covey.config.files import user_path
from covey.config.model_sources import MODEL_CONFIG_FILE, ModelKind, locate_model
from covey.llm.generation.decoder import linear_layers, token_bytes, weights_of
from covey.llm.generation.graph_decoder import rows_of_tile
from covey.llm.model.architecture import GPU_FEATURES, Heads, is_llama_like, obstacle
from covey.llm.model.files import check_config, config_of, family_of, read_model_config, reading, skeleton
from covey.llm.model.gguf import read_gguf_config
from covey.llm.model.lora import adaptable_paths, quantizable_layers

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


class LinearShape(NamedTuple):
    """A linear layer below the output layer, to which an adapter may be added."""

    path: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a decoder that determine its memory."""

    parameters: int  # all weights, tied ones once
    trunk_parameters: int  # weights below the output layer, with tied embeddings
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    feed_forward_kept: int  # number of tensors of width `intermediate` that autograd keeps per layer
    is_tied: bool  # the output layer shares the embedding's weights
    has_rms_norm: bool  # computed in fp32, which keeps more than torch's own LayerNorm
    has_head_norms: bool  # queries and keys are normalised too
    has_output_norms: bool  # and what attention and MLP add
    prepacked_parameters: int  # weights that decoding on a CPU copies (prepacks)
    has_kernels: bool  # covey's kernels support the model on a CPU
    has_gpu_kernels: bool  # and on a GPU
    architecture: str  # class name of the model
    linear: tuple[LinearShape, ...]
    quantizable: tuple[int, ...]  # numbers of weights of the layers that may be in 4 bits

    @property
    def attention_heads(self) -> Heads:
        return Heads(self.heads, self.kv_heads, self.head_dim)

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def rows_of_tile(self) -> int:
        """Number of rows that read the keys of their prompt together in covey's kernels for GPUs."""
        return rows_of_tile(self.attention_heads)

    def kernels_on(self, device: str) -> bool:
        """Whether covey's kernels support the model on "cpu" or "cuda"."""
        return self.has_kernels if device == "cpu" else self.has_gpu_kernels

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token, of `itemsize` bytes each."""
        return token_bytes(self.layers, self.attention_heads, itemsize)


def read_dimensions(model_config: dict[str, Any], model: str = "of this config.json") -> Dimensions:
    """The dimensions of the model with this `config.json`; `model` is its name in messages.

    transformers builds the model on torch's meta device, where tensors have shapes and no memory, so the weights of
    every architecture that it knows are counted exactly.

    Raises:
        ConfigError: if the dict describes no causal or vision-language model that transformers knows.
    """
    fields = {name: value for name, value in model_config.items() if name != "quantization_config"}
    family = family_of(fields)
    check_config(fields, model, family)
    config = config_of(fields, model)
    module = skeleton(config, model, family)
    with reading(f"model {model}: its config.json describes no language model known here", "check it"):
        return _dimensions(config, module)


def _dimensions(config: PreTrainedConfig, module: PreTrainedModel) -> Dimensions:
    text = config.get_text_config()
    # A recurrent model has no attention heads. Its state is counted as one head, which overestimates it.
    heads, hidden = int(getattr(text, "num_attention_heads", 1)), int(text.hidden_size)
    layers, vocabulary = int(text.num_hidden_layers), int(text.vocab_size)
    for name, value in (("heads", heads), ("hidden units", hidden), ("layers", layers), ("tokens", vocabulary)):
        if value < 1:
            raise ConfigError(f"the model's config.json describes no language model: it has {value} {name}")
    names = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    own = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or getattr(text, "n_inner", None)
    head = module.get_output_embeddings()
    return Dimensions(
        parameters=_count(module),
        trunk_parameters=_count(module.base_model),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        intermediate=own or 4 * hidden,
        vocabulary=vocabulary,
        feed_forward_kept=_feed_forward_kept(text, is_gated="gate_proj" in names or "gate_up_proj" in names),
        is_tied=head is not None and head.weight is module.get_input_embeddings().weight,
        has_rms_norm=any("RMSNorm" in type(part).__name__ for part in module.modules()),
        has_head_norms="q_norm" in names,
        has_output_norms="post_feedforward_layernorm" in names,
        prepacked_parameters=weights_of(linear_layers(module)),
        has_kernels=is_llama_like(module),
        has_gpu_kernels=not obstacle(module, GPU_FEATURES),
        architecture=type(module).__name__,
        linear=tuple(_linear_shape(module, path) for path in adaptable_paths(module)),
        quantizable=tuple(layer.weight.numel() for layer in quantizable_layers(module).values()),
    )


def _linear_shape(module: nn.Module, path: str) -> LinearShape:
    layer: Any = module.get_submodule(path)
    rows, columns = layer.weight.shape
    return LinearShape(path, *((columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _feed_forward_kept(text: Any, *, is_gated: bool) -> int:
    """Number of tensors of width `intermediate` that autograd keeps.

    Gated MLP: gate, activation, up projection and their product. Otherwise the activation's input and result; for a
    GELU composed of operations x, x / 2, tanh, 1 + tanh and the result.
    """
    if is_gated:
        return 4
    activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None)
    return 5 if activation == "gelu_new" else 2


def find_model_config(model: str) -> dict[str, Any] | None:
    """Find the `config.json` of a model by its name in a recipe, or by its own path, without asking a hub.

    Returns None for a hub's model that is not on this machine.

    Raises:
        ConfigError: if there is no such model, or its config cannot be read.
    """
    if model.endswith(".json"):
        return read_model_config(user_path(model, "model: "))
    source = locate_model(model)
    if source.kind is ModelKind.EMBEDDED:
        return SMOLLM2_135M
    if source.kind is ModelKind.GGUF:
        return read_gguf_config(source.path)
    if source.kind is ModelKind.HUB:
        return _cached_config(source.name)
    assert source.description is not None
    return read_model_config(source.description / MODEL_CONFIG_FILE)


def _cached_config(name: str) -> dict[str, Any] | None:
    """The `config.json` of a hub's model in the local cache, or None."""
    try:
        cached = try_to_load_from_cache(name, MODEL_CONFIG_FILE)
    except HFValidationError:
        return None
    return read_model_config(Path(cached)) if isinstance(cached, (str, os.PathLike)) else None
