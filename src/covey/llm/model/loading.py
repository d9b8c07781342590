"""Loads models by name for recipes, commands and scripts, wraps models that are already in memory, and checks both.

Shapes: L tokens of the trial, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel

from covey.config import ConfigError, LoRAConfig
from covey.config.model_sources import (
    ADAPTER_CONFIG_FILE,
    MODEL_CONFIG_FILE,
    ModelKind,
    ModelSource,
    Origin,
    locate_model,
    read_adapter_config,
)
from covey.config.sft import kind_of_class
from covey.llm.model.architecture import is_llama_like, position_limit
from covey.llm.model.chat import Chat, end_ids_of
from covey.llm.model.files import (
    CAUSAL,
    GENERATION_FILE,
    IMAGES,
    Family,
    WeightFiles,
    build,
    cached_folder,
    check_causal,
    check_config,
    check_tokenizer_files,
    do_not_fit,
    download,
    family_of,
    misfits,
    read_model_config,
    read_part,
    read_weight_files,
    reading,
    skeleton,
)
from covey.llm.model.gguf import converted, embedded_file, read_gguf_config
from covey.llm.model.lora import Adapter, add_adapter, check_base, checksum_of_base, merge_adapter, quantize
from covey.runtime.checkpoint import CheckpointFolder

BUFFERS_FILE = "buffers.safetensors"  # in a run's architecture folder: the model's persistent buffers
CACHE_LINE = 64  # bytes


@dataclass
class LoadedModel:
    """A causal language model with its chat and its source."""

    module: PreTrainedModel
    chat: Chat
    source: str


@dataclass(frozen=True)
class Description:
    """A model without its weights."""

    folder: Path
    config: PreTrainedConfig
    module: PreTrainedModel  # on the meta device
    tokenizer: Any
    generation: GenerationConfig | None
    weights: WeightFiles | None  # None: the weights of a run's checkpoint

    def load(self, dtype: torch.dtype, name: str) -> PreTrainedModel:
        """The model with the weights of its files. Raises ConfigError if they do not fit."""
        assert self.weights is not None
        with self.weights.open() as tensors:
            return build(type(self.module), self.config, tensors, dtype, name)


def load_model(
    name: str, *, dtype: torch.dtype, device: torch.device, in_4bit: bool = False, family: Family | None = CAUSAL
) -> LoadedModel:
    """Load a model by its name in a recipe.

    Args:
        name: `smollm2-135m`, a folder in Hugging Face's layout, a `.gguf` file, a hub name, a run folder of covey (its
            model or, if the run was stopped, its newest checkpoint) or one of its checkpoints.
        in_4bit: quantize the linear layers, which are frozen then (`lora.load_in_4bit`), before the weights are on the
            device.
        family: the model is of this kind; None: as its config says.

    Raises:
        ConfigError: if nothing has this name, or it is not a complete model of the family.
    """
    source = locate_model(resolve_checkpoint(name))
    if holds_adapter(source):
        loaded, adapter = load_adapted_checkpoint(
            source, dtype=dtype, device=torch.device("cpu") if in_4bit else device, family=family
        )
        merge_adapter(adapter.model)
        if in_4bit:
            quantize(loaded.module, device)
            loaded.module.to(device)  # type: ignore[arg-type]
        return loaded
    described = _describe(source, model_folder(source), name, family)
    if source.kind is ModelKind.CHECKPOINT:
        origin = source.origin
        assert origin is not None
        assert origin.step is not None
        masters = CheckpointFolder(origin.checkpoints).tensors(origin.step, "optimizer/masters")
        kind = type(described.module)
        module = build(kind, described.config, masters, dtype, name, is_whole=False)
        load_checkpoint_weights(module, origin, "optimizer", "start from that run's model/")
        _load_buffers(module, described.folder)
    else:
        module = described.load(dtype, name)
    if described.generation is not None and module.can_generate():
        module.generation_config = described.generation
    module.name_or_path = module.config.name_or_path = str(described.folder)
    check_weights(module, name)
    if in_4bit:
        quantize(module, device)
    module.to(device)  # type: ignore[arg-type]  # transformers hides torch's signature
    align(module)
    return _ready(module, described.tokenizer, str(described.folder), name)


def holds_adapter(source: ModelSource) -> bool:
    """True for a checkpoint of a run with LoRA, which holds the adapter alone."""
    folder = source.description
    return source.kind is ModelKind.CHECKPOINT and folder is not None and (folder / ADAPTER_CONFIG_FILE).is_file()


def load_adapted_checkpoint(
    source: ModelSource, *, dtype: torch.dtype, device: torch.device, family: Family | None = CAUSAL
) -> tuple[LoadedModel, Adapter]:
    """Load the base model of a run with LoRA, and add the adapter of a checkpoint to it.

    Raises:
        ConfigError: if the base model is not found or has changed, or the checkpoint is damaged.
    """
    folder, origin = source.description, source.origin
    assert folder is not None
    assert origin is not None
    base, in_4bit = str(origin.config_tables["model"]), origin.in_4bit
    loaded = load_model(base, dtype=dtype, device=device, in_4bit=in_4bit, family=family)
    check_base(folder, checksum_of_base(loaded.module), "put them back as they were")
    adapter = add_adapter(loaded.module, read_adapter_config(folder, LoRAConfig(load_in_4bit=in_4bit)))
    load_checkpoint_weights(adapter.parameters, origin, "optimizer", "start from that run's model/")
    return loaded, adapter


def describe_model(folder: Path, name: str, family: Family | None = CAUSAL, *, has_weights: bool = True) -> Description:
    """Read and check a model without its weights; of the weights only the headers of their files.

    Args:
        name: the model's name in messages.
        family: models of this kind are expected; None: as the config says.
        has_weights: False for the architecture of a run, whose weights are in its checkpoints.

    Raises:
        ConfigError: for the first fault.
    """
    fields = read_model_config(folder / MODEL_CONFIG_FILE)
    family = family or family_of(fields)
    check_config(fields, name, family)
    if family in (CAUSAL, IMAGES) and (scores := kind_of_class(fields)):
        raise ConfigError(
            f"model {name} is {scores.with_article}, which writes no text: choose a {family.noun}, or name it as a "
            f'reward: [[rewards]] with model = "{name}"'
        )
    check_tokenizer_files(folder, name)
    weights = read_weight_files(folder, name) if has_weights else None
    config = read_part(AutoConfig, folder, name)
    module = skeleton(config, name, family)
    if weights is not None:
        _check_count(module, weights, name)
    tokenizer = read_part(AutoTokenizer, folder, name)
    check_tokenizer(tokenizer, module, name)
    has_file = (folder / GENERATION_FILE).is_file()
    generation = read_part(GenerationConfig, folder, name) if has_file else None
    return Description(folder, config, module, tokenizer, generation, weights)


def _describe(source: ModelSource, folder: Path, name: str, family: Family | None = CAUSAL) -> Description:
    return describe_model(folder, name, family, has_weights=source.kind is not ModelKind.CHECKPOINT)


def check_model_files(name: str, family: Family = CAUSAL) -> None:
    """Check tokenizer and config of a model, without reading its weights, downloading or converting it.

    Raises:
        ConfigError: for the first fault.
    """
    source = locate_model(resolve_checkpoint(name))
    if source.kind is ModelKind.GGUF:
        read_gguf_config(source.path)
    folder = cached_folder(name) if source.kind is ModelKind.HUB else source.description
    if folder is not None:
        _describe(source, folder, name, family)


def find_skeleton(name: str) -> PreTrainedModel | None:
    """A model without its weights, on torch's meta device; None if it is not on this machine.

    Raises:
        ConfigError: for a fault of its config or tokenizer.
    """
    folder = _local_folder(name)
    return None if folder is None else describe_model(folder, name, None, has_weights=False).module


def find_chat(name: str) -> tuple[Chat, PreTrainedConfig] | None:
    """Tokenizer and config of a model without its weights; None if they are not on this machine or unusable, in which
    case `load_model` raises the error.
    """
    try:
        if (folder := _local_folder(name)) is None:
            return None
        chat = Chat(read_part(AutoTokenizer, folder, name), frozenset(), folder=folder)
        return chat, read_part(AutoConfig, folder, name)
    except ConfigError:
        return None


def _local_folder(name: str) -> Path | None:
    """The folder with a model's config and tokenizer; None for a hub's model that is not on this machine."""
    source = locate_model(resolve_checkpoint(name))
    return cached_folder(source.name) if source.kind is ModelKind.HUB else model_folder(source)


def load_chat(name: str) -> tuple[Chat, PreTrainedConfig]:
    """The chat and the config of a model without its weights.

    Raises:
        ConfigError: as `load_model`, for a fault of the config or the tokenizer.
    """
    source = locate_model(resolve_checkpoint(name))
    described = _describe(source, model_folder(source), name)
    end_ids = end_ids_of(described.config, described.generation, described.tokenizer)
    embedding: Any = described.module.get_input_embeddings()
    return Chat(described.tokenizer, end_ids, len(embedding.weight), folder=described.folder), described.config


def resolve_checkpoint(name: str) -> str:
    """`name` in a form that is valid in any working directory; for the folder of a stopped run its newest checkpoint.

    A run records its model, and can be resumed only if that does not change. The folder of a stopped run may change.

    Raises:
        ConfigError: if there is no such model, or the run has no complete checkpoint.
    """
    source = locate_model(name)
    if source.kind is not ModelKind.RUN:
        return source.name
    assert source.origin is not None
    checkpoints = CheckpointFolder(source.origin.checkpoints)
    newest = checkpoints.latest()
    if newest is None:
        raise ConfigError(f"the run in {source.name} has no checkpoint that is whole: name another model")
    return str(checkpoints.folder(newest))


def model_folder(source: ModelSource) -> Path:
    """The folder with a model's config and tokenizer. Converts a GGUF file at first use; downloads a hub's model.

    Raises:
        ConfigError: with the fix.
    """
    if source.kind is ModelKind.EMBEDDED:
        return converted(embedded_file())
    if source.kind is ModelKind.GGUF:
        return converted(source.path)
    if source.kind is ModelKind.HUB:
        return download(source.name)
    folder = source.description
    assert folder is not None
    return folder


def find_model(name: str) -> str:
    """The folder with config and tokenizer of the model `name`, and except for checkpoints with its weights.

    Raises:
        ConfigError: with the fix.
    """
    return str(model_folder(locate_model(name)))


@torch.no_grad()
def align(module: nn.Module) -> None:
    """Copy parameters whose memory does not begin at a cache line, such as those of a mapped file.

    The last bits of a matrix product depend on the alignment of its operands, and ranks with sharded weights gather
    them into memory that torch has aligned.
    """
    for parameter in module.parameters():
        if parameter.data_ptr() % CACHE_LINE:
            parameter.data = parameter.data.clone()


def _check_count(module: nn.Module, weights: WeightFiles, name: str) -> None:
    """Refuse files with fewer numbers than the architecture, before memory is allocated for the missing ones."""
    needed = sum(parameter.numel() for parameter in module.parameters())
    if needed <= weights.numbers:
        return
    shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    others = {key for key in shapes.keys() & weights.shapes.keys() if shapes[key] != weights.shapes[key]}
    few = f"{needed:,} numbers are needed, its files hold {weights.numbers:,}"
    raise do_not_fit(name, [few, *misfits(shapes.keys() - weights.shapes.keys(), others)])


@torch.no_grad()
def load_checkpoint_weights(module: nn.Module, origin: Origin, optimizer: str, advice: str) -> None:
    """Load a checkpoint's weights into a module: the masters of an optimizer, rounded to the module's precision.

    Args:
        module: a module with the parameters of the one in that run.
        origin: the run and its checkpoint.
        optimizer: name of the optimizer's state in the checkpoint.
        advice: the fix in the message, if the parameters differ.

    Raises:
        ConfigError: if the checkpoint is damaged or its weights belong to another module.
    """
    assert origin.step is not None
    masters = CheckpointFolder(origin.checkpoints).tensors(origin.step, f"{optimizer}/masters")
    parameters = dict(module.named_parameters())
    saved, needed = ({name: tensor.shape for name, tensor in tensors.items()} for tensors in (masters, parameters))
    if saved != needed:
        raise ConfigError(
            f"the checkpoint of step {origin.step} in {origin.run_dir} holds other weights than are needed: {advice}"
        )
    for name, master in masters.items():
        parameters[name].copy_(master)


def save_architecture(module: PreTrainedModel, chat: Chat, folder: Path) -> None:
    """Write the parts of a model that checkpoints do not have: config, tokenizer and persistent buffers."""
    module.config.save_pretrained(folder)
    if module.can_generate() and module.generation_config is not None:
        module.generation_config.save_pretrained(folder)
    chat.save(folder)
    buffers = _saved_buffers(module)
    if buffers:
        save_file({name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}, folder / BUFFERS_FILE)


def _saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers of a model, such as the correction of a router's scores."""
    state, parameters = module.state_dict(), dict(module.named_parameters(remove_duplicate=False))
    return {name: buffer for name, buffer in module.named_buffers() if name in state and name not in parameters}


@torch.no_grad()
def _load_buffers(module: nn.Module, folder: Path) -> None:
    buffers = _saved_buffers(module)
    if buffers:
        saved = load_file(folder / BUFFERS_FILE)
        for name, buffer in buffers.items():
            buffer.copy_(saved[name])


def wrap_model(module: nn.Module, tokenizer: Any = None) -> LoadedModel:
    """Wrap a model that is already in memory; it keeps its device and precision.

    Args:
        module: a causal language model of transformers.
        tokenizer: the model's tokenizer; None loads it from the model's source.

    Raises:
        ConfigError: for any other module, or if no tokenizer is found.
    """
    if not isinstance(module, PreTrainedModel) or module.get_output_embeddings() is None:
        raise ConfigError(
            f"a causal language model of transformers, or its name, is needed; this is a {type(module).__name__}"
        )
    name = str(module.name_or_path or type(module).__name__)
    check_causal(module.config, name)
    if tokenizer is None:
        if not module.name_or_path:
            raise ConfigError("the model does not say where its tokenizer is: give tokenizer=...")
        try:
            tokenizer = read_part(AutoTokenizer, Path(find_model(module.name_or_path)), name)
        except ConfigError as error:
            raise ConfigError(f"the model's tokenizer is not found ({error}): give tokenizer=...") from error
    check_tokenizer(tokenizer, module, name)
    check_weights(module, name)
    return _ready(module, tokenizer, str(module.name_or_path), name)


def train_padding(module: nn.Module) -> None:
    """Give the padding row of embeddings a gradient. In many models it is also the end token, which must be trained."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.padding_idx = None


def _ready(module: PreTrainedModel, tokenizer: Any, source: str, name: str) -> LoadedModel:
    if not is_llama_like(module):  # Llama-like models are causal; in bf16 the trial takes seconds on some processors
        check_forward(module, name)
    train_padding(module)
    try:
        end_ids = end_ids_of(module.config, module.generation_config, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"model {name}: {error}") from error
    embedding: Any = module.get_input_embeddings()
    folder = Path(source) if source else None
    return LoadedModel(module, Chat(tokenizer, end_ids, len(embedding.weight), folder=folder), source)


TRIAL_TOKENS = 8
# Logits may not depend on later tokens. Tolerance for rounding, as a fraction of their spread.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
COARSE_TOLERANCE = 0.02  # in bf16 two computations of the same number may differ by 2^-8


@torch.no_grad()
def check_weights(module: nn.Module, model: str) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        ConfigError: naming the first of them.
    """
    for name, weight in module.named_parameters():
        if weight.numel() and not torch.stack([weight.amax(), weight.amin()]).isfinite().all():
            count = int((~weight.isfinite()).sum())
            raise ConfigError(
                f"model {model}: {count:,} of the {weight.numel():,} numbers of its weight {name} are NaN or infinite: "
                "take an earlier version of the model"
            )


def check_tokenizer(tokenizer: Any, module: nn.Module, model: str) -> None:
    """Refuse a tokenizer with ids beyond the model's embedding. A larger embedding is allowed: many are padded.

    Special tokens that are not in prompts may be beyond the embedding: many fine-tuned models have such a padding
    token, and transformers adds one of its own to some tokenizers. `Chat.encode` refuses a prompt with such a token.

    Raises:
        ConfigError: with the first token without an embedding.
    """
    with reading(f"model {model}: its tokenizer does not work"):
        vocabulary = tokenizer.get_vocab()
        special = {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
        used = f"{tokenizer.chat_template or ''}{tokenizer.bos_token or ''}{tokenizer.eos_token or ''}"
    if not vocabulary:
        raise ConfigError(f"model {model}: its tokenizer has no tokens: copy the tokenizer of the model again")
    rows = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    unused = {token for token in special if token not in used}
    beyond = sorted((number, token) for token, number in vocabulary.items() if number >= rows and token not in unused)
    if beyond:
        number, token = beyond[0]
        raise ConfigError(
            f"model {model}: its tokenizer knows {len(beyond)} tokens that have no embedding (the first is {token!r}, "
            f"number {number}; the embedding has {rows} rows): take the tokenizer that belongs to the model, or "
            f"enlarge the embedding with model.resize_token_embeddings({beyond[-1][0] + 1}) and save both again"
        )
    head = module.get_output_embeddings()  # type: ignore[operator]
    predicted = getattr(getattr(head, "weight", None), "shape", (rows,))[0]
    if predicted > rows:
        raise ConfigError(
            f"model {model}: it predicts {predicted} tokens but has an embedding for {rows}: its config.json is damaged"
        )


@torch.no_grad()
def check_forward(module: nn.Module, model: str) -> None:
    """Try the model on two rows of a few tokens with a common prefix: the logits must be finite, and those of the
    prefix equal.

    Raises:
        ConfigError: if it fails, computes NaN, or is an encoder.
    """
    was_training = module.training
    module.eval()
    try:
        with reading(f"model {model}: it cannot be evaluated"):
            rows = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
            length = min(TRIAL_TOKENS, position_limit(module.config) or TRIAL_TOKENS)
            alike = max(1, length // 2)
            tokens_2L = (torch.arange(1, length + 1, device=next(module.parameters()).device) * 7 % rows).repeat(2, 1)
            tokens_2L[1, alike:] = (tokens_2L[1, alike:] + 1 + rows // 2) % rows
            logits_2LV: Tensor = module(input_ids=tokens_2L, use_cache=False).logits.float()
    finally:
        module.train(was_training)
    dtype = next(module.parameters()).dtype
    if (logits_2LV.isnan() | logits_2LV.isposinf()).any():  # some models exclude tokens by -inf
        raise ConfigError(
            f"model {model}: its logits are NaN or infinite in {str(dtype).removeprefix('torch.')}: try --precision "
            "fp32, or another model"
        )
    one_LV, other_LV = logits_2LV[:, :alike]
    gap = torch.where(one_LV == other_LV, 0.0, one_LV - other_LV).abs().max()
    if gap > TOLERANCE.get(dtype, COARSE_TOLERANCE) * one_LV[one_LV.isfinite()].std():
        raise ConfigError(
            f"model {model}: a token sees those after it, so it is an encoder and no causal language model: choose a "
            "decoder, such as Llama, Qwen or GPT-2"
        )
