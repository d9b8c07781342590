"""A model's own forward pass over one sequence, without padding, cache or further arguments: the reference for all
faster implementations.

Shapes: L tokens, T decisions (the last tokens), V vocabulary.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def next_token_logits(module: nn.Module, tokens_L: Tensor, decisions: int) -> Tensor:
    """logits_TV that predict the last `decisions` tokens of a sequence."""
    known = accepted(module, use_cache=False, logits_to_keep=decisions)
    logits: Tensor = module(input_ids=tokens_L[None, :-1], **known).logits[0]
    return logits[-decisions:]


class PlainPasses:
    """Cached plain forward passes of a model whose weights do not change."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.known: dict[tuple[int, ...], Tensor] = {}  # logits_LV after each token of a sequence

    def after(self, sequences: list[list[int]]) -> list[Tensor]:
        """logits_LV after each token of every sequence. A prefix of another sequence needs no forward pass."""
        for tokens in sorted(map(tuple, sequences), key=len, reverse=True):
            if not any(begins(known, tokens) for known in self.known):
                tokens_L = torch.tensor([*tokens, 0], device=self.module.device)
                self.known[tokens] = next_token_logits(self.module, tokens_L, len(tokens))
        return [
            next(logits_LV[: len(tokens)] for known, logits_LV in self.known.items() if begins(known, tuple(tokens)))
            for tokens in sequences
        ]


def begins(whole: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """True if a sequence begins with these tokens."""
    return whole[: len(tokens)] == tokens


def accepted(module: nn.Module, **arguments: Any) -> dict[str, Any]:
    """The arguments that the signature of this model's forward pass has; some models refuse others."""
    names = _parameters(type(module).forward)
    return {name: value for name, value in arguments.items() if name in names}


def exact_logprobs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities over the last dimension, at least in fp32."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(exact) / temperature).log_softmax(dim=-1)


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
