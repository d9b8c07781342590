"""Bytes that autograd keeps of the attention in `prefix_attention`."""

from __future__ import annotations

from covey.llm.model.architecture import Heads
from covey.llm.model.prefix_attention import attends_by_products


def kept_bytes(heads: Heads, prompts: int, rows: int, prompt_tokens: int, fed: int, itemsize: int) -> int:
    """Bytes of one layer's `PackedLayout.attend`, without queries and result, which the layer around it keeps.

    Args:
        heads: H, K and D.
        prompts, rows: S prompts and R completions; the prompts have no common prefix.
        prompt_tokens, fed: tokens of each prompt and of each completion.
        itemsize: bytes of an activation.
    """
    query, key_value = heads.queries * heads.width, heads.keys * heads.width
    of_prompts, of_completions = prompts * prompt_tokens, rows * fed
    tokens = of_prompts + of_completions
    prompt_part = of_prompts * (query * itemsize + heads.queries * 4)
    if heads.keys == heads.queries:
        prompt_part += 2 * tokens * key_value * itemsize
    else:
        prompt_part += 2 * of_prompts * query * itemsize  # keys and values, repeated for every head
    seen = prompt_tokens + fed
    if attends_by_products(heads.queries, rows, fed, prompt_tokens):
        scores = of_completions * heads.queries * seen
        keys_and_values = 2 * tokens * key_value * itemsize
        return prompt_part + (scores + of_completions * query) * itemsize + keys_and_values
    keys_and_values = 2 * rows * seen * query * itemsize
    mask = of_completions * seen * itemsize
    return prompt_part + keys_and_values + mask + of_completions * (heads.queries * 4 + query * itemsize)
