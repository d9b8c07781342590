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
    """Autoregressive decoding of a batch of rows."""

    compact_threshold: float  # ended rows are removed by `select` if they are more than this fraction of all rows
    can_fork: bool  # True if `select` may repeat a row
    block: int  # number of tokens that `draw` may draw at once; 1: the decoder has no `draw`

    def free_rows(self) -> int:
        """Number of rows that can be added now."""

    def prefill(self, prompts: list[list[int]], group_size: int, common: int | None = None) -> Tensor:
        """Append `group_size` rows for each prompt; returns logits_SV of the token after each prompt.

        `common` is the number of tokens that all prompts share and that are fed once, if the decoder can; None: chosen
        from the prompts.
        """

    def step(self, tokens_R: Tensor) -> Tensor:
        """Feed one token to every row; returns logits_RV of the next token."""

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 indices, ascending). If `can_fork`, an index that occurs twice copies the row."""


def token_bytes(layers: int, heads: Heads, itemsize: int) -> int:
    """Bytes of the keys and values of one token in all layers; each number has `itemsize` bytes."""
    return 2 * layers * heads.keys * heads.width * itemsize


def prefill(
    module: PreTrainedModel, prompts: list[list[int]], common: int | None = None
) -> tuple[Tensor, PrefillLayout]:
    """hidden_SW of the last token of each prompt, and the layout with the keys and values of all prompts."""
    layout = PrefillLayout(prompts, module.device, common)
    hidden_NW = forward(module.base_model, layout.tokens, layout.positions, layout)
    return hidden_NW[layout.prompt_ends.to(module.device)], layout


class PrefillLayout(PackedLayout):
    """Layout of prompts without completions, which stores their keys and values by layer."""

    stores_prompts = True

    def __init__(self, prompts: list[list[int]], device: torch.device, common: int | None = None) -> None:
        super().__init__(prompts, device=device, common=common)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def store_prompt_kv(self, layer: int, key_KSPD: Tensor, value_KSPD: Tensor) -> None:
        assert layer == len(self.keys)
        self.keys.append(key_KSPD.contiguous())
        self.values.append(value_KSPD.contiguous())
