"""Bytes that autograd keeps of transformers' own layers. No code of covey allocates these tensors."""

from __future__ import annotations

from covey.llm.memory.dimensions import Dimensions


def kept_bytes(size: Dimensions, itemsize: int) -> int:
    """Bytes kept of one token in one layer, without attention's keys, values and scores.

    These are in `prefix_attention`. `itemsize`: bytes of an activation.
    """
    norms = 2 * (norm_bytes(size, size.hidden, itemsize) + size.hidden * itemsize)  # and the results
    queries_and_result = 2 * size.query * itemsize
    mlp = size.feed_forward_kept * size.intermediate * itemsize
    head_norms = norm_bytes(size, size.query + size.key_value, itemsize) if size.has_head_norms else 0
    return norms + queries_and_result + mlp + head_norms


def norm_bytes(size: Dimensions, features: int, itemsize: int) -> int:
    """Bytes of a norm's input of `features` numbers; an RMSNorm also keeps its input in fp32."""
    return features * ((4 + itemsize) if size.has_rms_norm else itemsize)
