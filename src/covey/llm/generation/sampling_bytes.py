"""Bytes that `LocalGenerator` allocates for some requests, composed from those of the modules that it uses."""

from __future__ import annotations

from typing import NamedTuple

from covey.llm.generation import (
    batch,
    decoder,
    local_generator,
    native_decoder,
    shared_prefix_decoder,
    token_sampling,
)
from covey.llm.model.architecture import Heads


class SamplingBytes(NamedTuple):
    """Bytes of the buffers of one batch."""

    keys_and_values: int
    logits: int  # and the probabilities that tokens are drawn from


def token_bytes(heads: Heads, layers: int, itemsize: int) -> int:
    """Bytes of the keys and values of one token."""
    return decoder.token_bytes(layers, heads, itemsize)


def decoded_rows(
    token: int, *, requests: int, completions: int, max_rows: int, max_new_tokens: int, device: str
) -> int:
    """Number of completions that are generated together, in whole groups.

    Args:
        token: bytes of the keys and values of a token.
        requests, completions, max_rows, max_new_tokens, device: as in `sampling_bytes`.
    """
    fitting = max_rows or local_generator.fitting_rows(token * max_new_tokens, device)
    return local_generator.rows_together(fitting, requests, completions) // completions * completions


def sampling_bytes(
    heads: Heads,
    layers: int,
    vocabulary: int,
    itemsize: int,
    *,
    requests: int,
    completions: int,
    max_rows: int,
    max_new_tokens: int,
    prompt_tokens: int,
    native: bool,
    device: str,
) -> SamplingBytes:
    """Bytes for requests of equal size, with as many whole groups at a time as fit.

    Args:
        heads, layers, vocabulary: dimensions of the model.
        itemsize: bytes of a key, a value and a logit.
        requests, completions: number of prompts, and of completions of each.
        max_rows: completions that are generated together; 0 if memory decides.
        max_new_tokens, prompt_tokens: tokens of a completion and of a prompt.
        native: `NativeDecoder` and covey's kernels if True, else `SharedPrefixDecoder` and torch.
        device: "cpu" or "cuda".
    """
    token = token_bytes(heads, layers, itemsize)
    rows = decoded_rows(
        token,
        requests=requests,
        completions=completions,
        max_rows=max_rows,
        max_new_tokens=max_new_tokens,
        device=device,
    )
    logits = batch.logits_bytes(rows, vocabulary, itemsize)
    shape = token, rows, max_new_tokens, rows // completions, prompt_tokens
    if native:
        return SamplingBytes(native_decoder.cache_bytes(*shape), logits)
    return SamplingBytes(
        shared_prefix_decoder.cache_bytes(*shape, device),
        logits + token_sampling.buffer_bytes(rows, vocabulary, device),
    )
