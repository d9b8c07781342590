"""Loads reward models by name, and begins new ones from language models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from covey.config import ConfigError
from covey.config.model_sources import MODEL_CONFIG_FILE, ModelKind
from covey.config.sft import RewardModelKind, kind_of_class, locate_reward_model, no_reward_model
from covey.llm.generation.backend import find_kernels
from covey.llm.model.architecture import is_llama_like, vocabulary_of
from covey.llm.model.chat import Chat
from covey.llm.model.files import check_config, check_tokenizer_files, read_model_config, read_weight_files, reading
from covey.llm.model.fused_layers import fuse
from covey.llm.model.loading import check_tokenizer, check_weights, load_model, model_folder, train_padding
from covey.llm.model.pretrained import build, cached_folder, do_not_fit, read_config, read_tokenizer
from covey.llm.reward_models.model import RewardModel, head_of, read_scale
from covey.llm.reward_models.trial import longest_sequence, padding_is_inert, shares_prompts

CLASSES: dict[RewardModelKind, Any] = {
    RewardModelKind.OUTCOME: AutoModelForSequenceClassification,
    RewardModelKind.PROCESS: AutoModelForTokenClassification,
}
ARCHITECTURES = {
    RewardModelKind.OUTCOME: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    RewardModelKind.PROCESS: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
LABELS = {RewardModelKind.OUTCOME: (1,), RewardModelKind.PROCESS: (1, 2)}


def load_reward_model(name: str, *, dtype: torch.dtype, device: torch.device) -> RewardModel:
    """Load a reward model by its name: a folder, a run of `covey reward-model train`, or a hub name.

    Raises:
        ConfigError: if nothing has this name, or it is not a reward model.
    """
    source = locate_reward_model(name)
    is_whole = source.kind in (ModelKind.FOLDER, ModelKind.HUB)
    fields = read_model_config(model_folder(source) / MODEL_CONFIG_FILE) if is_whole else None
    kind = kind_of_class(fields)
    if kind is None:
        raise ConfigError(no_reward_model(name, fields))
    return _load_classifier(model_folder(source), name, kind, dtype, device)


def begin_reward_model(name: str, kind: RewardModelKind, *, dtype: torch.dtype, device: torch.device) -> RewardModel:
    """A reward model to train: that of the given name if it is one, else a new one on a language model.

    A new one has the language model's decoder and a linear layer of zeros in place of its output layer, so that all its
    scores are 0.

    Raises:
        ConfigError: if the model cannot be loaded, or is a reward model of the other kind.
    """
    source = locate_reward_model(name)
    if source.kind in (ModelKind.FOLDER, ModelKind.HUB):
        folder = model_folder(source)
        found = kind_of_class(read_model_config(folder / MODEL_CONFIG_FILE))
        if found is kind:
            return _load_classifier(folder, name, kind, dtype, device)
        if found is not None:
            raise ConfigError(
                f"model {name} is {found.with_article}, but these data train {kind.with_article}: begin with another "
                "model"
            )
    loaded = load_model(name, dtype=dtype, device=device)
    module = classifier_on(loaded.module, kind, name)
    return wrap_classifier(module, loaded.chat, kind, name, is_new=True)


def wrap_classifier(
    module: PreTrainedModel, chat: Chat, kind: RewardModelKind, name: str, *, is_new: bool = False
) -> RewardModel:
    """A reward model on a classifier in memory, with covey's packed forward pass if the classifier supports it.

    Args:
        is_new: its head has not been trained yet.

    Raises:
        ConfigError: if its weights are not finite, its tokenizer does not fit, or its forward pass fails.
    """
    _set_padding(module, chat.tokenizer, is_new=is_new)
    check_tokenizer(chat.tokenizer, module, name)
    check_weights(module, name)
    train_padding(module)
    with reading(f"model {name}: it cannot be evaluated", "choose another model"):
        longest = longest_sequence(module)
    shares = shares_prompts(module)
    pads = not shares and padding_is_inert(module)
    if shares and is_llama_like(module):
        fuse(module, find_kernels(module.device, module.dtype))
    return RewardModel(module, chat, kind, shares_prompts=shares, pads=pads, longest=longest)


def classifier_on(language_model: PreTrainedModel, kind: RewardModelKind, name: str) -> PreTrainedModel:
    """A classifier with the decoder of a causal language model, which is not copied, and a head of zeros.

    Raises:
        ConfigError: if transformers has no such classifier for the architecture.
    """
    config: PreTrainedConfig = copy.deepcopy(language_model.config)
    config.num_labels = 1
    module = _skeleton(config, kind, name)
    head = head_of(module)
    decoder = language_model.base_model
    if head is None or type(module.base_model) is not type(decoder):
        raise ConfigError(
            f"model {name}: {type(module).__name__} is not a linear layer on the same decoder: choose another model"
        )
    setattr(module, module.base_model_prefix, decoder)
    first = next(decoder.parameters())
    head.to_empty(device=first.device).to(first.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    module.config.architectures = [type(module).__name__]
    module.name_or_path = language_model.name_or_path
    return module


def count_parameters(name: str) -> int | None:
    """Number of weights of a reward model, from its config alone; None if it has not been downloaded.

    Raises:
        ConfigError: if nothing has this name, or it is not a reward model.
    """
    source = locate_reward_model(name)
    folder = cached_folder(source.name) if source.kind is ModelKind.HUB else source.description
    if folder is None:
        return None
    fields = read_model_config(folder / MODEL_CONFIG_FILE)
    kind = kind_of_class(fields)
    if kind is None:
        raise ConfigError(no_reward_model(name, fields))
    return sum(parameter.numel() for parameter in _skeleton(read_config(folder, name), kind, name).parameters())


def _skeleton(config: PreTrainedConfig, kind: RewardModelKind, name: str) -> PreTrainedModel:
    """The classifier of a config without weights, on torch's meta device."""
    noun = kind.value.removeprefix("For")
    if config.model_type not in ARCHITECTURES[kind]:
        raise ConfigError(f"model {name}: transformers has no {noun} for its architecture: choose another model")
    with reading(f"model {name}: its config.json describes no {noun}", "correct it"), torch.device("meta"):
        module = CLASSES[kind].from_config(config, trust_remote_code=False)
        assert isinstance(module, PreTrainedModel)
        return module


def _load_classifier(
    folder: Path, name: str, kind: RewardModelKind, dtype: torch.dtype, device: torch.device
) -> RewardModel:
    fields = read_model_config(folder / MODEL_CONFIG_FILE)
    classes = f"{kind.value.removeprefix('For')} of transformers: choose another model"
    check_config(fields, name, ARCHITECTURES[kind], classes)
    check_tokenizer_files(folder, name)
    weights = read_weight_files(folder, name)
    config = read_config(folder, name)
    if config.num_labels not in LABELS[kind]:
        allowed = " or ".join(map(str, LABELS[kind]))
        raise ConfigError(
            f"model {name} has {config.num_labels} labels, but {kind.with_article} has {allowed}: take a model with "
            f"num_labels = {allowed}"
        )
    skeleton = _skeleton(config, kind, name)
    with weights.open() as tensors:
        module, unfit = build(type(skeleton), config, tensors, dtype, name)
    if unfit:
        raise do_not_fit(name, unfit)
    module.to(device)  # type: ignore[arg-type]  # transformers hides torch's signature
    embedding: Any = module.get_input_embeddings()
    chat = Chat(read_tokenizer(folder, name), frozenset(), len(embedding.weight))
    model = wrap_classifier(module, chat, kind, name)
    with reading(f"model {name}: its file of scores cannot be read"):
        model.scale = read_scale(folder)
    return model


def _set_padding(module: PreTrainedModel, tokenizer: Any, *, is_new: bool) -> None:
    """Give model and tokenizer the same padding token, with which transformers finds the last token of a row.

    A reward model that has none reads its scores at the last token, as transformers does. A new one takes the end
    token, so that transformers can compute batches with it.
    """
    config = module.config.get_text_config()
    candidates = [config.pad_token_id, tokenizer.pad_token_id, *([tokenizer.eos_token_id] if is_new else [])]
    embedded = range(vocabulary_of(module))
    pad = next((token for token in candidates if token is not None and token in embedded), None)
    if tokenizer.pad_token_id != pad:
        tokenizer.pad_token = None if pad is None else tokenizer.convert_ids_to_tokens(pad)
    config.pad_token_id = module.config.pad_token_id = pad
