"""The sizes of a model from its `config.json` alone: no weight is read, none is allocated."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from covey.config import EMBEDDED_MODELS, ConfigError
from covey.config.origins import architecture_of
from covey.llm.families import is_llama_like

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

NOT_A_MODEL = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError, ImportError)


@dataclass(frozen=True)
class Dimensions:
    """What the memory of a decoder follows from."""

    parameters: int  # all weights, tied ones once
    trunk_parameters: int  # those below the output layer; tied embeddings belong to the trunk
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    feed_forward_kept: int  # tensors as wide as `intermediate` that autograd keeps of a layer
    is_tied: bool  # the output layer is the embedding table
    has_rms_norm: bool  # computed in fp32, which keeps more than torch's own LayerNorm
    has_head_norms: bool  # queries and keys are normalised as well
    packed_parameters: int  # that decoding on a CPU copies into another order
    has_kernels: bool  # covey's own, on a CPU

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim


def read_dimensions(model_config: dict[str, Any]) -> Dimensions:
    """The dimensions of the model that the dict of a `config.json` describes.

    transformers builds the model on torch's meta device, where tensors have shapes and no memory, so the weights of
    every architecture that it knows are counted exactly.

    Raises:
        ConfigError: if the dict describes no causal language model that transformers knows.
    """
    fields = {name: value for name, value in model_config.items() if name != "quantization_config"}
    kind = fields.pop("model_type", None)
    if kind is None:
        raise ConfigError("the model's config.json has no model_type, so its memory cannot be predicted")
    try:
        config = AutoConfig.for_model(kind, **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
        layers, vocabulary = int(text.num_hidden_layers), int(text.vocab_size)
    except (*NOT_A_MODEL, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"the model's config.json describes no language model known here: {reason}") from error
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    own = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or getattr(text, "n_inner", None)
    head = model.get_output_embeddings()
    return Dimensions(
        parameters=_count(model),
        trunk_parameters=_count(model.base_model),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        intermediate=own or 4 * hidden,
        vocabulary=vocabulary,
        feed_forward_kept=_feed_forward_kept(text, is_gated="gate_proj" in names or "gate_up_proj" in names),
        is_tied=head is not None and head.weight is model.get_input_embeddings().weight,
        has_rms_norm=any("RMSNorm" in type(part).__name__ for part in model.modules()),
        has_head_norms="q_norm" in names,
        packed_parameters=sum(part.weight.numel() for part in model.modules() if type(part) is nn.Linear),
        has_kernels=is_llama_like(model),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _feed_forward_kept(text: Any, *, is_gated: bool) -> int:
    """Gated: the gate, its activation, the other half, their product. Else: the activation's input and result; where
    GELU is written out, x, x / 2, tanh and 1 + tanh besides the result.
    """
    if is_gated:
        return 4
    activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None)
    return 5 if activation == "gelu_new" else 2


def find_model_config(model: str) -> dict[str, Any] | None:
    """The `config.json` of a model by the name that a recipe gives it, or by its own path; None where it is not on this
    machine.

    Raises:
        ConfigError: for a file that cannot be read, or a run without a language model.
    """
    model = architecture_of(model)
    if model in EMBEDDED_MODELS:
        return SMOLLM2_135M
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_config(path)
    files = [path] if path.is_file() else [folder / "config.json" for folder in (path, path / "model")]
    if not path.exists():
        try:
            cached = try_to_load_from_cache(model, "config.json")
        except HFValidationError:  # a path, and nothing is there
            return None
        files = [Path(cached)] if isinstance(cached, (str, os.PathLike)) else []
    for file in files:
        if file.is_file():
            return _read_json(file)
    return None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is no config.json of a model: it must hold an object")
    return config


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
