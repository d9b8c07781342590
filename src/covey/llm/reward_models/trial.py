"""Test of a classifier on random tokens: whether the packed forward pass gives the logits of its own.

Shapes: R rows, N reads, L tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.generation.trial import MIN_TOKENS, TOLERANCE, Trial, in_fp32, probe_batch
from covey.llm.model.architecture import vocabulary_of
from covey.llm.model.hidden_states import hidden_states_for_actions, row_tokens
from covey.llm.model.plain_forward import accepted
from covey.llm.model.prefix_attention import IMPLEMENTATION
from covey.llm.reward_models.model import head_of


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


def _packs(module: PreTrainedModel, trial: Trial, length: int) -> bool:
    pad = module.config.get_text_config().pad_token_id
    count = vocabulary_of(module)
    ids = [(token + (token == pad)) % count for token in trial.ids]  # the score is not read at padding
    batch = probe_batch(ids, length).to(module.device)
    trial.restore_attention()
    plain = torch.cat([_plain(module, row_tokens(batch, row, column)) for row, column in batch.mask_BT.nonzero()])
    module.set_attn_implementation(IMPLEMENTATION)
    read = hidden_states_for_actions(module.base_model, batch, packed=True)
    head = head_of(module)
    assert head is not None
    packed = head(read.hidden_NW)[read.index_D]
    return bool((packed - plain).abs().max() <= TOLERANCE * plain.abs().max())


def _plain(module: PreTrainedModel, tokens_L: Tensor) -> Tensor:
    """logit_1C of the classifier's own forward pass at the last token."""
    known = accepted(module, use_cache=False)
    logits: Tensor = module(input_ids=tokens_L[None], **known).logits
    return logits if logits.dim() == 2 else logits[:, -1]


@contextmanager
def _large_weights(head: torch.nn.Linear) -> Iterator[None]:
    """Context manager in which a head that may be all zeros is not, so that it shows its inputs."""
    before = head.weight.data
    waves = torch.arange(before.numel(), device=before.device, dtype=torch.float32).sin().view_as(before)
    head.weight.data = waves.to(before.dtype)
    try:
        yield
    finally:
        head.weight.data = before
