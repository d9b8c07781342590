"""Tests of a classifier on random tokens: whether the packed forward pass, and that of padded rows, give the logits of
its own; the length that it takes.

Shapes: R rows, N reads, L tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.generation.trial import MIN_TOKENS, TOLERANCE, Trial, in_fp32, probe_batch
from covey.llm.model.architecture import longest_row, vocabulary_of
from covey.llm.model.logprobs import hidden_states_for_actions, row_tokens
from covey.llm.model.plain_forward import accepted
from covey.llm.model.prefix_attention import IMPLEMENTATION
from covey.llm.reward_models.model import head_of

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
        except Exception:  # model code that does not support a layout may raise any exception
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
        except Exception:  # BART refuses rows with different numbers of end tokens
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
    return min((limit for limit in limits if limit is not None), default=None)


def _packs(module: PreTrainedModel, trial: Trial, length: int) -> bool:
    batch = probe_batch(_ids(module, trial.ids), length).to(module.device)
    trial.restore_attention()
    plain = torch.cat([_plain(module, row_tokens(batch, row, column)) for row, column in batch.mask_BT.nonzero()])
    module.set_attn_implementation(IMPLEMENTATION)
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
