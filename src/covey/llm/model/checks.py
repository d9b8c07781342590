"""Checks of a model in memory: weights, tokenizer, causality.

Shapes: L tokens of the trial, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from covey.config import ConfigError
from covey.llm.model.architecture import position_limit
from covey.llm.model.foreign_files import reading

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
