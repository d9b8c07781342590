"""Reads files of other programs, such as models: any exception of a library while it reads one becomes one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from transformers.utils import logging as transformers_logging

from covey.config import ConfigError
from covey.config.faults import machine_error
from covey.config.files import LONGEST_MODEL_CONFIG, read_json, walk

LARGEST_SIZE = 2**40  # largest integer in a config.json
MOST_LAYERS = 1000  # real models have up to a few hundred
MOST_EXPERTS = 2**20  # "Mixture of a million experts" (arXiv 2407.04153); experts may be rows of an embedding

# Names of numbers of layers and of experts, but not of their sizes, such as vocab_size_per_layer_input.
_LIMITS = (
    (re.compile(r"^(num|n)_.*(layer|block)|(layers?|blocks|depth)$"), MOST_LAYERS),
    (re.compile(r"^(?!.*(size|dim|capacity)).*expert"), MOST_EXPERTS),
)


@contextmanager
def reading(what: str, advice: str = "the file may be damaged") -> Iterator[None]:
    """Turn any exception of the block into a ConfigError; transformers logs only errors in the block.

    Libraries document few of their exceptions, and a damaged file may raise any.

    Args:
        what: beginning of the message, such as "model 'x' cannot be loaded".
        advice: end of the message.

    Raises:
        ConfigError: for an invalid file.
        MachineError: for a fault of the machine.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if fault := machine_error(error):
            raise fault from error
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise ConfigError(f"{what} ({reason}): {advice}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def read_model_config(path: Path) -> dict[str, Any]:
    """Read the object in a `config.json`.

    Raises:
        ConfigError: if it cannot be read, is no object, or has a number that no model has.
    """
    config = read_json(path, LONGEST_MODEL_CONFIG, strict=False)  # some have infinities
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no config.json of a model: it must hold an object")
    check_model_config(config, str(path))
    return config


def check_model_config(config: dict[str, Any], where: str) -> None:
    """Refuse numbers that no model has before a model is built, because a billion layers take hours.

    Raises:
        ConfigError: beginning with `where`.
    """
    for name, value in walk(config):
        if type(value) is not int:
            continue
        key = name.rpartition(".")[2]
        most = min((limit for pattern, limit in _LIMITS if pattern.search(key)), default=LARGEST_SIZE)
        if abs(value) > most:
            raise ConfigError(f"{where}: {name} is {value}, and no model has more than {most}")


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The dimensions in a GGUF file's header, under the names of a `config.json`.

    Raises:
        ConfigError: if it is no GGUF file of a language model.
    """
    with reading(f"{path} is no GGUF file of a language model"):
        return _config_of(GGUFReader(path), path)


def _config_of(reader: GGUFReader, path: Path) -> dict[str, Any]:
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
    check_model_config(config, str(path))
    return config | {"model_type": kind, "tie_word_embeddings": "output.weight" not in tensors}
