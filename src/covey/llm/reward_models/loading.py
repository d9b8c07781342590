"""Loads reward models by name, and begins new ones from language models. Tests on random tokens decide whether the
packed and the padded forward pass give the same logits as the classifier's own.

Shapes: R rows, N reads, L tokens, C labels.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
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
from covey.config.files import raise_fault
from covey.config.model_sources import MODEL_CONFIG_FILE, ModelKind
from covey.config.sft import RewardModelKind, kind_of_class, locate_reward_model, no_reward_model
from covey.llm.generation.backend import find_kernels
from covey.llm.generation.trial import MIN_TOKENS, TOLERANCE, Trial, in_fp32, probe_batch
from covey.llm.model.architecture import is_llama_like, longest_row, shortest, vocabulary_of
from covey.llm.model.chat import Chat
from covey.llm.model.files import Family, cached_folder, read_model_config, read_part, reading, skeleton
from covey.llm.model.fused_layers import fuse
from covey.llm.model.loading import (
    check_tokenizer,
    check_weights,
    describe_model,
    load_model,
    model_folder,
    train_padding,
)
from covey.llm.model.logprobs import hidden_states_for_actions, row_tokens
from covey.llm.model.plain_forward import accepted
from covey.llm.model.prefix_attention import IMPLEMENTATION
from covey.llm.reward_models.model import RewardModel, head_of, read_scale

FAMILIES = {
    RewardModelKind.OUTCOME: Family(
        AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "SequenceClassification"
    ),
    RewardModelKind.PROCESS: Family(
        AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, "TokenClassification"
    ),
}
LABELS = {RewardModelKind.OUTCOME: (1,), RewardModelKind.PROCESS: (1, 2)}


def load_reward_model(name: str, *, dtype: torch.dtype, device: torch.device) -> RewardModel:
    """Load a reward model by its name: a folder, a run of `covey reward-model train`, or a hub name.

    Raises:
        ConfigError: if nothing has this name, or it is not a reward model.
    """
    folder, fields = _find(name)
    kind = kind_of_class(fields)
    if folder is None or kind is None:
        raise ConfigError(no_reward_model(name, fields))
    return _load_classifier(folder, name, kind, dtype, device)


def begin_reward_model(name: str, kind: RewardModelKind, *, dtype: torch.dtype, device: torch.device) -> RewardModel:
    """A reward model to train: that of the given name if it is one, else a new one on a language model.

    A new one has the language model's decoder and a linear layer of zeros in place of its output layer, so that all its
    scores are 0.

    Raises:
        ConfigError: if the model cannot be loaded, or is a reward model of the other kind.
    """
    folder, fields = _find(name)
    found = kind_of_class(fields)
    if folder is not None and found is kind:
        return _load_classifier(folder, name, kind, dtype, device)
    if found is not None:
        raise ConfigError(
            f"model {name} is {found.with_article}, but these data train {kind.with_article}: begin with another model"
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
    module = skeleton(config, name, FAMILIES[kind])
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
    folder, fields = _find(name, download=False)
    kind = kind_of_class(fields)
    if folder is None:
        return None
    if kind is None:
        raise ConfigError(no_reward_model(name, fields))
    module = skeleton(read_part(AutoConfig, folder, name), name, FAMILIES[kind])
    return sum(parameter.numel() for parameter in module.parameters())


def _find(name: str, *, download: bool = True) -> tuple[Path | None, dict[str, Any] | None]:
    """The folder of a model and the content of its `config.json`; None for a source that holds no reward model, and
    without `download` for a hub's model that is not on this machine.
    """
    source = locate_reward_model(name)
    if source.kind is ModelKind.HUB:
        folder = model_folder(source) if download else cached_folder(source.name)
    else:
        folder = source.description if source.kind is ModelKind.FOLDER else None
    return folder, None if folder is None else read_model_config(folder / MODEL_CONFIG_FILE)


def _load_classifier(
    folder: Path, name: str, kind: RewardModelKind, dtype: torch.dtype, device: torch.device
) -> RewardModel:
    described = describe_model(folder, name, FAMILIES[kind])
    labels = described.config.num_labels
    if labels not in LABELS[kind]:
        allowed = " or ".join(map(str, LABELS[kind]))
        raise ConfigError(
            f"model {name} has {labels} labels, but {kind.with_article} has {allowed}: take a model with num_labels = "
            f"{allowed}"
        )
    module = described.load(dtype, name)
    module.to(device)  # type: ignore[arg-type]  # transformers hides torch's signature
    chat = Chat(described.tokenizer, frozenset(), vocabulary_of(module))
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


POSITIONS_TRIED = 3


@torch.no_grad()
def shares_prompts(module: PreTrainedModel) -> bool:
    """True if rows may be packed; then the model's attention implementation is covey's.

    The logits of a classifier may depend on later tokens (an encoder) or on more than the last hidden state (a pooler),
    and its attention may have a window or a bias that no layout has. All of these show as other logits.
    """
    head = head_of(module)
    if head is None or not module._can_set_attn_implementation():
        return False
    trial = Trial(module)
    if trial.has_untested_window:
        return False
    module.eval()
    same = False
    with in_fp32(module), _large_weights(head):
        try:
            same = all(_packs(module, trial, length) for length in sorted({MIN_TOKENS, trial.longest}))
        except Exception as error:  # model code that does not support a layout may raise any exception
            raise_fault(error)
            same = False
        finally:
            if not same:
                trial.restore_attention()
    return same


@torch.no_grad()
def padding_is_inert(module: PreTrainedModel) -> bool:
    """True if padding at the right does not change the logits.

    Some encoders have no attention mask (FNet), or a pooler that reads the last position (XLNet).
    """
    pad = module.config.get_text_config().pad_token_id
    if pad is None:
        return False
    module.eval()
    ids = _ids(module, Trial(module).ids)[:MIN_TOKENS]
    short = ids[: MIN_TOKENS // 2]
    rows_RL = torch.tensor([ids, short + [pad] * (MIN_TOKENS - len(short))], device=module.device)
    mask_RL = (torch.arange(MIN_TOKENS) < torch.tensor([[MIN_TOKENS], [len(short)]])).long().to(module.device)
    with in_fp32(module), _large_weights(head_of(module)):
        try:
            known = accepted(module, use_cache=False, attention_mask=mask_RL)
            padded = module(input_ids=rows_RL, **known).logits[1]
            plain = module(input_ids=torch.tensor([short], device=module.device), **accepted(module, use_cache=False))
        except Exception as error:  # BART refuses rows with different numbers of end tokens
            raise_fault(error)
            return False
    expected = plain.logits[0]
    found = padded if padded.dim() == 1 else padded[: len(short)]
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


@torch.no_grad()
def longest_sequence(module: PreTrainedModel) -> int | None:
    """Length of the longest sequence whose score does not depend on others, in tokens; None without a limit.

    Tables of learned positions may begin with rows that no token uses: RoBERTa's has 514 rows for 512 tokens. Such a
    table is the embedding that is asked for successive rows.
    """
    limits = [longest_row(module.config)]
    end, count = module.config.get_text_config().eos_token_id, vocabulary_of(module)
    token = _ids(module, [count - 1])[0]
    last = end if isinstance(end, int) and 0 <= end < count else token  # BART needs one
    asked: list[tuple[int, Tensor]] = []
    hooks = [
        part.register_forward_hook(lambda part, inputs, _: asked.append((part.num_embeddings, inputs[0].flatten())))
        for part in module.modules()
        if isinstance(part, torch.nn.Embedding)
    ]
    try:
        tokens_1L = torch.tensor([[token] * POSITIONS_TRIED + [last]], device=module.device)
        module(input_ids=tokens_1L, **accepted(module, use_cache=False))
    finally:
        for hook in hooks:
            hook.remove()
    for rows, index_L in asked:
        if index_L[:POSITIONS_TRIED].tolist() == [int(index_L[0]) + place for place in range(POSITIONS_TRIED)]:
            limits.append(rows - int(index_L[0]))
    return shortest(*limits)


def _packs(module: PreTrainedModel, trial: Trial, length: int) -> bool:
    batch = probe_batch(_ids(module, trial.ids), length).to(module.device)
    trial.restore_attention()
    plain = torch.cat([_plain(module, row_tokens(batch, row, column)) for row, column in batch.mask_BT.nonzero()])
    module.set_attn_implementation(IMPLEMENTATION)
    cast(Any, module.base_model).set_attn_implementation(IMPLEMENTATION)  # has its own config before transformers 5.18
    read = hidden_states_for_actions(module.base_model, batch, packed=True)
    head = head_of(module)
    assert head is not None
    packed = head(read.hidden_NW)[read.index_D]
    return bool((packed - plain).abs().max() <= TOLERANCE * plain.abs().max())


def _ids(module: PreTrainedModel, ids: list[int]) -> list[int]:
    """Tokens without padding, at which no score is read."""
    pad, count = module.config.get_text_config().pad_token_id, vocabulary_of(module)
    return [(token + (token == pad)) % count for token in ids]


def _plain(module: PreTrainedModel, tokens_L: Tensor) -> Tensor:
    """logit_1C of the classifier's own forward pass at the last token."""
    known = accepted(module, use_cache=False)
    logits: Tensor = module(input_ids=tokens_L[None], **known).logits
    return logits if logits.dim() == 2 else logits[:, -1]


@contextmanager
def _large_weights(head: torch.nn.Linear | None) -> Iterator[None]:
    """Context manager in which a head that may be all zeros is not, so that it shows its inputs."""
    if head is None:
        yield
        return
    before = head.weight.data
    waves = torch.arange(before.numel(), device=before.device, dtype=torch.float32).sin().view_as(before)
    head.weight.data = waves.to(before.dtype)
    try:
        yield
    finally:
        head.weight.data = before
