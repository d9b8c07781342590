"""Calls transformers' loaders, always without running a model's own code or asking a hub.

Exceptions of transformers about a model's files become one line that names the model.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from covey.config import ConfigError
from covey.llm.model.foreign_files import reading

ENCODERS = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)  # unless is_decoder is set
SAFELY: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


def config_of(fields: Mapping[str, Any], model: str) -> PreTrainedConfig:
    """Build the config from the content of a `config.json`.

    Raises:
        ConfigError: if transformers cannot build a config from it.
    """
    with reading(f"model {model}: its config.json describes no language model known here"):
        fields = {name: value for name, value in fields.items() if name not in ("quantization_config", "auto_map")}
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        assert isinstance(config, PreTrainedConfig)
        return config


def read_config(folder: Path, model: str) -> PreTrainedConfig:
    """Read the config in a folder.

    Raises:
        ConfigError: if transformers cannot build a config from it.
    """
    with reading(f"model {model}: its config.json cannot be loaded"):
        config = AutoConfig.from_pretrained(str(folder), **SAFELY)
        assert isinstance(config, PreTrainedConfig)
        return config


def read_tokenizer(folder: Path, model: str) -> PreTrainedTokenizerBase:
    """Read the tokenizer in a folder.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    with reading(f"model {model}: its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **SAFELY)
        assert isinstance(tokenizer, PreTrainedTokenizerBase), type(tokenizer).__name__
        return tokenizer


def read_generation_config(folder: Path, model: str) -> GenerationConfig:
    """Read the generation config in a folder.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    with reading(f"model {model}: its generation_config.json cannot be loaded"):
        return GenerationConfig.from_pretrained(str(folder), local_files_only=True)


def check_causal(config: PreTrainedConfig, model: str) -> None:
    """Refuse encoders by their config.

    Raises:
        ConfigError: naming the architecture.
    """
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ConfigError(
            f"model {model}: {kind} is an encoder with a decoder, no causal language model: choose a decoder"
        )
    causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in ENCODERS and not causal:
        raise ConfigError(
            f"model {model}: {kind} is an encoder, in which a token sees those after it, and no causal language model: "
            "choose a decoder, such as Llama, Qwen or GPT-2"
        )


def skeleton(config: PreTrainedConfig, model: str) -> PreTrainedModel:
    """The causal language model of a config without weights, on torch's meta device: names and shapes only.

    Raises:
        ConfigError: if the config describes no causal language model.
    """
    check_causal(config, model)
    with (
        reading(f"model {model}: its config.json describes no language model known here"),
        torch.device("meta"),
    ):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        assert isinstance(module, PreTrainedModel)
        return module


def build(
    kind: type[PreTrainedModel], config: PreTrainedConfig, tensors: Mapping[str, Any], dtype: torch.dtype, model: str
) -> tuple[PreTrainedModel, list[str]]:
    """Build a model with the given weights; returns it and one text for each kind of mismatch.

    Args:
        kind: the class of its `skeleton`.
        tensors: name -> tensor, with the names of a transformers checkpoint.

    Raises:
        ConfigError: if transformers cannot load them.
    """
    with reading(f"model {model}: its weights cannot be loaded"):
        loaded: Any = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            attn_implementation=None,  # a config may name an implementation from its own code
            **SAFELY,
        )
    module, info = loaded
    misfits = []
    for what, keys in (
        ("missing from its files", info["missing_keys"]),
        ("of another shape than its config.json says", {entry[0] for entry in info["mismatched_keys"]}),
        ("in its files, but not in its architecture", info["unexpected_keys"]),
    ):
        if keys:
            misfits.append(f"{len(keys)} {'weight is' if len(keys) == 1 else 'weights are'} {what} ({min(keys)})")
    return module, [*misfits, *map(str, info["error_msgs"])]


def trunk_class(config: PreTrainedConfig, model: str) -> type[PreTrainedModel]:
    """The class of a decoder without its output layer, for a critic."""
    with reading(f"model {model}: its config.json describes no decoder known here"), torch.device("meta"):
        return type(AutoModel.from_config(config, trust_remote_code=False))


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Context manager that hides libraries' progress bars if standard error is no terminal."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


def read_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read the model, in bf16, and the tokenizer of a GGUF file.

    Raises:
        ConfigError: if the file is damaged, its architecture is unknown, or a weight is missing.
    """
    with reading(f"model {file}: the GGUF file cannot be read"), _bars_on_terminals_only():
        read: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True, **SAFELY
        )
        loaded, info = read
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **SAFELY)
        missing = sorted(info["missing_keys"]) + sorted(entry[0] for entry in info["mismatched_keys"])
        if missing:
            raise ConfigError(f"model {file}: {len(missing)} weights are missing from the GGUF file ({missing[0]})")
        # transformers treats the loaded model as quantised and cannot save it, so its weights are moved to a new one.
        fields = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
        plain = skeleton(type(loaded.config)(**fields), str(file))  # meta: no random weights
        plain.load_state_dict(loaded.bfloat16().state_dict(), assign=True)
        return plain, tokenizer


def save_weights(module: PreTrainedModel, state: dict[str, Tensor], folder: Path) -> None:
    """Write a model in the format of transformers: its config, and these weights instead of its own."""
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    module.save_pretrained(folder, state_dict=dict(state))  # transformers empties the dict
    if module.dtype != dtype:  # sharded weights are fp32 masters
        module.config.dtype = dtype
        module.config.save_pretrained(folder)
