"""The interface of decoders, and the prefill that two of them share.

A decoder takes prompts, each shared by the rows of a group, and returns the logits of every row's next token. The
implementations are `NativeDecoder`, `SharedPrefixDecoder`, `CacheDecoder` and `FullForwardDecoder`; `backend.py`
selects one.

Shapes: S prompts, P longest prompt, R rows, K key-value heads, D head width, W hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.model.architecture import Heads
from covey.llm.model.prefix_attention import PackedLayout, forward


class Decoder(Protocol):
    """The rows of some groups, decoded together."""

    compact_threshold: float  # fraction of its rows that must have ended before `select` is worth its cost
    can_fork: bool  # whether `select` makes two rows of one that is named twice

    def free_rows(self) -> int:
        """Number of rows that may be added now."""

    def prefill(self, prompts: list[list[int]], group_size: int) -> Tensor:
        """Add `group_size` rows for each prompt, after the others; logits_SV of the token after each prompt."""

    def step(self, tokens_R: Tensor) -> Tensor:
        """Feed one token to every row; logits_RV of the next."""

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only (int64 index, ascending). If `can_fork`, a row that is named twice becomes two."""


def token_bytes(layers: int, heads: Heads, itemsize: int) -> int:
    """Bytes of the keys and values of one token in all layers; each number has `itemsize` bytes."""
    return 2 * layers * heads.keys * heads.width * itemsize


def prefill(module: PreTrainedModel, prompts: list[list[int]]) -> tuple[Tensor, PrefillLayout]:
    """hidden_SW of the last token of each prompt, and the layout that remembers keys and values of all of them."""
    layout = PrefillLayout(prompts, device=module.device)
    hidden_NW = forward(module.base_model, layout.tokens, layout.positions, layout)
    return hidden_NW[layout.prompt_ends.to(module.device)], layout


class PrefillLayout(PackedLayout):
    """Prompts alone; remembers their keys and values."""

    stores_prompts = True

    def __init__(self, prompts: list[list[int]], device: torch.device) -> None:
        super().__init__(prompts, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def store_prompt_kv(self, layer: int, key_KSPD: Tensor, value_KSPD: Tensor) -> None:
        assert layer == len(self.keys)
        self.keys.append(key_KSPD.contiguous())
        self.values.append(value_KSPD.contiguous())
