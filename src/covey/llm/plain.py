"""A model's own forward pass over one sequence, without padding, cache or extra arguments: the numbers that every
faster way of covey has to give.

Shapes: L tokens, T decisions (the last tokens), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def next_token_logits(module: nn.Module, tokens_L: Tensor, decisions: int) -> Tensor:
    """logits_TV that predict the last `decisions` tokens of a sequence, from the tokens before each."""
    known = accepted(module, use_cache=False, logits_to_keep=decisions)
    logits: Tensor = module(input_ids=tokens_L[None, :-1], **known).logits[0]
    return logits[-decisions:]


def accepted(module: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that the forward pass of this model has by name. Some models refuse others."""
    names = _parameters(type(module).forward)
    return {name: value for name, value in arguments.items() if name in names}


def exact_logprobs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities over the last dimension, at least in fp32."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(exact) / temperature).log_softmax(dim=-1)


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
