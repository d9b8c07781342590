"""Calls the loaders of transformers, always without running the code of a model, and the model hub.

Exceptions of transformers about the files of a model become one line that names the model. Only `download` asks the
hub.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
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
from covey.llm.model.files import reading

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
    others = {entry[0] for entry in info["mismatched_keys"]}
    found = misfits(info["missing_keys"], others, info["unexpected_keys"])
    return module, [*found, *map(str, info["error_msgs"])]


def misfits(missing: Collection[str], others: Collection[str], unexpected: Collection[str] = ()) -> list[str]:
    """One text for each kind of mismatch between the names of weights and an architecture."""
    kinds = (
        ("missing from its files", missing),
        ("of another shape than its config.json says", others),
        ("in its files, but not in its architecture", unexpected),
    )
    return [
        f"{len(names)} {'weight is' if len(names) == 1 else 'weights are'} {what} ({min(names)})"
        for what, names in kinds
        if names
    ]


def do_not_fit(model: str, found: Sequence[str]) -> ConfigError:
    """The error for weights that are not those of the config, with the mismatches."""
    return ConfigError(
        f"model {model}: its weights and its config.json do not fit each other: {'; '.join(found)}: copy or download "
        "both again"
    )


def trunk_class(config: PreTrainedConfig, model: str) -> type[PreTrainedModel]:
    """The class of a decoder without its output layer, for a critic."""
    with reading(f"model {model}: its config.json describes no decoder known here"), torch.device("meta"):
        return type(AutoModel.from_config(config, trust_remote_code=False))


def save_weights(module: PreTrainedModel, state: dict[str, Tensor], folder: Path) -> None:
    """Write a model in the format of transformers: its config, and these weights instead of its own."""
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    module.save_pretrained(folder, state_dict=dict(state))  # transformers empties the dict
    if module.dtype != dtype:  # sharded weights are fp32 masters
        module.config.dtype = dtype
        module.config.save_pretrained(folder)


ANSWER_SECONDS = 8.0  # deadline of the hub's answer; the download itself has none
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja"]  # no pickle
NOT_HERE = (
    "name a folder or a .gguf file, or download it where there is a network (hf download {name} --local-dir FOLDER) "
    "and copy the folder here"
)

_log = logging.getLogger("covey")


def cached_folder(name: str) -> Path | None:
    """The local folder of a hub's model without asking the hub; None if it is not downloaded completely."""
    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        return None


def download(name: str) -> Path:
    """Download a hub's model if the hub has a newer version than this machine; returns its folder.

    The hub is asked once, with a deadline. If it does not answer, or `HF_HUB_OFFLINE` is set, the local version is
    used.

    Raises:
        ConfigError: if the hub has no such model, or does not answer and there is no local version.
    """
    offline = constants.is_offline_mode()
    failure = "HF_HUB_OFFLINE is set" if offline else ""
    if not offline:
        try:
            _ask(name)
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise ConfigError(
                f"model {name!r} is neither a folder nor a model of the hub (or it is private): check its name"
            ) from error
        except GatedRepoError as error:
            raise ConfigError(
                f"model {name!r} asks for its licence to be accepted: do so on {constants.ENDPOINT}/{name}, then hf "
                "auth login"
            ) from error
        except Exception as error:  # any of the layers below: names, sockets, TLS, proxies, HTTP
            failure = type(error).__name__
            if "Timeout" in failure:
                failure = f"it did not answer within {ANSWER_SECONDS:g} s"
            if isinstance(error, HfHubHTTPError) and error.response is not None:
                failure = f"HTTP status {error.response.status_code}"
    if failure:
        folder = cached_folder(name)
        if folder is None:
            raise ConfigError(
                f"model {name!r} is not on this machine, and the hub cannot be asked ({failure}): "
                + NOT_HERE.format(name=name)
            )
        _log.info("the hub cannot be asked (%s): %s is the version downloaded before", failure, name)
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:
        raise ConfigError(
            f"model {name!r} cannot be downloaded ({type(error).__name__}: {error}): try again"
        ) from error


def _ask(name: str) -> None:
    """Ask the hub for a model, in a thread, because a name server, a proxy or a hub that never answers can delay a
    request beyond its own time limit.

    Raises:
        TimeoutError: at the deadline. Exception: any of the request.
    """
    answers: SimpleQueue[Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=ANSWER_SECONDS)
            answers.put(None)
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True, name="covey-hub").start()
    try:
        error = answers.get(timeout=ANSWER_SECONDS)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
