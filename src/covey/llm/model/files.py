"""Reads and checks the files of a model, from a folder or the model hub, by the loaders of transformers.

Models that cannot be loaded are refused before their weights are read: those with code of their own, with pickled,
quantised or missing weights, with an architecture of another kind, or with damaged files. Any exception of a library
becomes one line. Code of a model is never run, and only `download` asks the hub.
"""

import logging
import math
import os
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

# transformers before 5.18 gives a placeholder for this name if torchvision is not installed.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from covey.config import ConfigError, files, hub
from covey.config.fields import or_list
from covey.config.files import machine_error, path_error, walk
from covey.config.model_sources import MODEL_CONFIG_FILE
from covey.config.sft import kind_of_class

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
        if isinstance(error, ImportError):
            advice = "install the package that it names"
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise ConfigError(f"{what} ({reason}): {advice}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def read_object(path: Path, most: int = files.LARGEST_DOCUMENT) -> dict[str, Any]:
    """Read the object in a JSON file of a model.

    Raises:
        ConfigError: if it cannot be read or is not an object.
    """
    value = files.read_json(path, most, strict=False)  # some configs have infinities
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it must hold a JSON object")
    return value


def read_model_config(path: Path) -> dict[str, Any]:
    """Read the object in a `config.json`.

    Raises:
        ConfigError: if it cannot be read, is not an object, or has a number that no model has.
    """
    config = read_object(path, files.LONGEST_MODEL_CONFIG)
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


WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# First bytes of a zip by torch.save, and of a bare pickle.
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
LFS_START = b"version https://git-lfs"
FLOATS = ("F64", "F32", "F16", "BF16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
                   "sentencepiece.bpe.model", "tokenizer_config.json")  # fmt: skip
TEMPLATE_FILE = "chat_template.jinja"

Tensors = dict[str, Any]


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a model and the content of their headers."""

    files: tuple[Path, ...]
    shapes: dict[str, tuple[int, ...]]

    @property
    def numbers(self) -> int:
        """Number of values in all tensors."""
        return sum(map(math.prod, self.shapes.values()))

    @contextmanager
    def open(self) -> Iterator[Tensors]:
        """Context manager of name -> tensor; each tensor is read from the disk when it is used."""
        with ExitStack() as stack:
            tensors: Tensors = {}
            for path in self.files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- it is not a dict
            yield tensors


class Family(NamedTuple):
    """Models that one class of transformers loads."""

    loader: Any
    architectures: Container[str]  # the model types that it knows
    noun: str
    fix: str = "choose another model"


CAUSAL = Family(
    AutoModelForCausalLM,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "causal language model",
    "choose a decoder, such as Llama, Qwen or GPT-2",
)
IMAGES = Family(  # of runs whose prompts have images
    AutoModelForImageTextToText,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "vision-language model",
    "choose one, such as Qwen2.5-VL, Idefics3 or Gemma 3, or remove the column with images from the data",
)


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family of a `config.json`: IMAGES for what is not a causal language model too."""
    kind = fields.get("model_type")
    return IMAGES if kind in IMAGES.architectures and kind not in CAUSAL.architectures else CAUSAL


def check_config(fields: dict[str, Any], model: str, family: Family = CAUSAL) -> None:
    """Refuse the `config.json` of a model that covey does not train; `model` is its name in messages.

    Raises:
        ConfigError: if it is not a model of the family, has code of its own, or is quantised.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError(f"model {model}: its {MODEL_CONFIG_FILE} has no model_type, so its architecture is unknown")
    listed = fields.get("architectures")
    classes = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    named = f"{classes[0]} (model_type {kind!r})" if classes else f"model_type {kind!r}"
    if kind not in family.architectures:
        if fields.get("auto_map"):
            raise ConfigError(own_code(model, f"its architecture {named}"))
        if kind not in CONFIG_MAPPING_NAMES:
            raise ConfigError(
                f"model {model}: its architecture {named} is unknown to transformers {transformers_version}: choose "
                "another model, or a newer transformers"
            )
        images = ", or give it prompts with images" if kind in IMAGES.architectures else ""
        raise ConfigError(f"model {model}: {named} is not a {family.noun}: {family.fix}{images}")
    quantised = fields.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ConfigError(
            f"model {model}: its weights are quantised ({method or 'quantization_config'}), which cannot be trained: "
            "take the unquantised model, or a GGUF file of it"
        )


def own_code(model: str, what: str) -> str:
    """Message for a model whose folder has Python code."""
    return (
        f"model {model}: {what} is code of the model's own, which covey never runs: choose a model whose architecture "
        f"transformers {transformers_version} has itself"
    )


def check_tokenizer_files(folder: Path, model: str) -> None:
    """Refuse a folder without a tokenizer, or whose tokenizer is code of its own.

    Raises:
        ConfigError: with the missing or damaged file.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES[:-1]):
        raise ConfigError(
            f"model {model}: {folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json of the model "
            "that it was trained from there"
        )
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (folder / name).is_file():
            fields = read_object(folder / name)
            code = fields.get("auto_map") if name == "tokenizer_config.json" else None
            if code and not (folder / "tokenizer.json").is_file():
                raise ConfigError(own_code(model, f"its tokenizer {fields.get('tokenizer_class', '')}".rstrip()))
    template = folder / TEMPLATE_FILE
    if os.path.lexists(template):  # transformers would ignore a path that is not a file
        try:
            files.read_file(template).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"model {model}: {template} is not text in UTF-8 ({error}): copy it again") from error


def read_weight_files(folder: Path, model: str) -> WeightFiles:
    """Read the headers of a folder's safetensors files.

    Raises:
        ConfigError: if there are none, or one is missing, damaged, a pickle, or has integers in place of weights.
    """
    files = _weight_paths(folder, model)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with open(path, "rb") as raw:
                start = raw.read(32)
            if start.startswith(PICKLE_STARTS) and start[8:9] != b"{":  # the length of a header may begin so
                raise ConfigError(
                    f"model {model}: {path.name} is a pickle under the name of safetensors: rename it to "
                    f"pytorch_model.bin, and {_convert(folder)}"
                )
            if start.startswith(LFS_START):
                raise ConfigError(f"model {model}: {path.name} is a pointer of Git LFS, not the weights: git lfs pull")
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- it is not a dict
                    tensor = file.get_slice(name)
                    shapes[name] = tuple(tensor.get_shape())
                    _check_type(name, tensor.get_dtype(), len(shapes[name]), model)
        except OSError as error:
            raise path_error(error, f"model {model}: {path.name} cannot be read", path) from error
        except SafetensorError as error:
            raise ConfigError(f"model {model}: {path.name} is damaged ({error}): copy or download it again") from error
    if not shapes:
        raise ConfigError(f"model {model}: {files[0].name} holds no weights: copy or download it again")
    return WeightFiles(files, shapes)


def _check_type(name: str, dtype: str, dimensions: int, model: str) -> None:
    if dtype not in FLOATS and dimensions >= 2 and name.endswith("weight"):
        raise ConfigError(
            f"model {model}: its weight {name} is stored as {dtype}, so it is quantised, which cannot be trained: take "
            f"the model in {or_list(FLOATS[1:])}, or a GGUF file of it"
        )


def _weight_paths(folder: Path, model: str) -> tuple[Path, ...]:
    if (folder / WEIGHTS_FILE).exists():
        return (folder / WEIGHTS_FILE,)
    if (folder / INDEX_FILE).exists():
        return _shards(folder, model)
    names = sorted(entry.name for entry in folder.iterdir())
    pickles = [name for name in names if name.lower().endswith(PICKLES) and name != "training_args.bin"]
    if pickles:
        raise ConfigError(
            f"model {model}: its weights are pickled ({pickles[0]}), and covey reads safetensors and GGUF only, "
            f"because a pickle can run code: {_convert(folder)}"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        raise ConfigError(f"model {model}: {folder} has {others[0]} but no {WEIGHTS_FILE}: rename it if it holds them")
    raise ConfigError(
        f"model {model}: {folder} has no weights: it needs {WEIGHTS_FILE}, or {INDEX_FILE} and its shards"
    )


def _shards(folder: Path, model: str) -> tuple[Path, ...]:
    """The files that an index names, which must exist inside the folder."""
    places = read_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ConfigError(f"model {model}: {INDEX_FILE} has no weight_map of names: copy or download it again")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or name in (".", "..") or "\0" in name:
            raise ConfigError(f"model {model}: {INDEX_FILE} names {name!r}, which lies outside the model's folder")
        if name.lower().endswith(PICKLES):
            raise ConfigError(f"model {model}: {INDEX_FILE} names the pickle {name}: {_convert(folder)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model {model}: {len(missing)} of the {len(names)} files with its weights are missing ({missing[0]}): "
            "copy or download them again"
        )
    return tuple(folder / name for name in names)


def _convert(folder: Path) -> str:
    """Instruction to convert a pickle to safetensors."""
    kind = kind_of_class(read_object(folder / MODEL_CONFIG_FILE))
    loader = f"AutoModel{kind.value}" if kind else "AutoModelForCausalLM"
    return (
        f'if you trust its source, convert it once with python -c "from transformers import {loader} as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


GENERATION_FILE = "generation_config.json"
ENCODERS = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)  # unless is_decoder is set
SAFELY: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
PARTS = {AutoConfig: "config.json", AutoTokenizer: "tokenizer", GenerationConfig: GENERATION_FILE}


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


def read_part(part: Any, folder: Path, model: str) -> Any:
    """Read the config, the tokenizer or the generation config in a folder: `part` is a key of `PARTS`.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    with reading(f"model {model}: its {PARTS[part]} cannot be loaded"):
        return part.from_pretrained(str(folder), **SAFELY)


def read_processor(folder: Path, kind: str, tokenizer: Any) -> Any:
    """The processor of images of a vision-language model, by PIL, without what reads videos and sound, which would need
    further packages.

    Args:
        folder: of the model.
        kind: its model type.
        tokenizer: of the model.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    base: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(kind, ""), object)

    class ImagesOnly(base):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Parts may be None."""

        @classmethod
        def _get_arguments_from_pretrained(cls, folder: str, processor_dict: Any = None, **_: Any) -> list[Any]:
            images = AutoImageProcessor.from_pretrained(folder, backend="pil", **SAFELY)
            parts = {"tokenizer": tokenizer, "image_processor": images}
            return [parts.get(name) for name in cls.get_attributes()]

    ImagesOnly.__name__ = base.__name__  # in messages
    with reading(
        f"model {folder}: its processor of images cannot be loaded", "copy its files again, or update transformers"
    ):
        return ImagesOnly.from_pretrained(str(folder), **SAFELY)


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


def skeleton(config: PreTrainedConfig, model: str, family: Family = CAUSAL) -> PreTrainedModel:
    """The model of a config without weights, on torch's meta device: names and shapes only.

    Raises:
        ConfigError: if the config describes no model of the family.
    """
    if family in (CAUSAL, IMAGES):
        check_causal(config, model)
    elif config.model_type not in family.architectures:
        raise ConfigError(
            f"model {model}: transformers has no {family.noun} for its architecture: choose another model"
        )
    with (
        reading(f"model {model}: its config.json describes no {family.noun} known here"),
        torch.device("meta"),
    ):
        module = family.loader.from_config(config, trust_remote_code=False)
        assert isinstance(module, PreTrainedModel)
        return module


def build(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Mapping[str, Any],
    dtype: torch.dtype,
    model: str,
    *,
    is_whole: bool = True,
) -> PreTrainedModel:
    """Build a model with the given weights.

    Args:
        kind: the class of its `skeleton`.
        tensors: name -> tensor, with the names of a transformers checkpoint.
        is_whole: refuse weights that are not exactly those of the config.

    Raises:
        ConfigError: if transformers cannot load them, or they do not fit.
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
    unfit = misfits(info["missing_keys"], others, info["unexpected_keys"]) + [str(one) for one in info["error_msgs"]]
    if unfit and is_whole:
        raise do_not_fit(model, unfit)
    assert isinstance(module, PreTrainedModel)
    return module


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
    answer = hub.ask(
        lambda: HfApi().model_info(name, timeout=hub.ANSWER_SECONDS),
        f"model {name!r}",
        missing="neither a folder nor a model of the hub",
        page=name,
    )
    failure = answer if isinstance(answer, str) else ""
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
