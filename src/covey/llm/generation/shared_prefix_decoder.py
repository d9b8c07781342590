"""Decoder that computes and stores the keys and values of a prompt once for all rows of its group.

It uses torch only and runs on any device. `native_decoder.py` has a faster one for Llama-like models on CPUs.

Shapes: S prompts, P longest prompt, R rows, T tokens decoded so far, H heads, K key-value heads, D head width,
M queries of a key-value head, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.generation.decoder import PrefillLayout, prefill
from covey.llm.generation.llama_layers import LlamaLayers
from covey.llm.generation.prepacked_linear import PackedLinears
from covey.llm.model.architecture import is_llama_like
from covey.llm.model.prefix_attention import Layout, SharedPrefixAttention, forward
from covey.llm.native.bindings import PAD

GROWTH = PAD  # tokens for which rows are given room together, as in the kernels


def capacity(tokens: int) -> int:
    """Number of own tokens that a row has room for while it has `tokens` of them."""
    return -(-tokens // GROWTH) * GROWTH


def cache_bytes(token_bytes: int, rows: int, max_new_tokens: int, prompts: int, prompt_tokens: int) -> int:
    """Largest number of bytes of the keys and values of all rows and of their prompts.

    `select` copies the keys of the remaining rows, then the values. Without forks, these are at most the fraction
    1 - `compact_threshold` of the rows.

    Args:
        token_bytes: of one token, see `decoder.token_bytes`.
        rows: R.
        max_new_tokens: limit of a row.
        prompts, prompt_tokens: S and P.
    """
    own = token_bytes * rows * capacity(max_new_tokens)
    copied = int(own / 2 * (1 - SharedPrefixDecoder.compact_threshold))
    return own + copied + token_bytes * prompts * prompt_tokens


class SharedPrefixDecoder:
    """Decoder for models of transformers whose attention takes a layout (see `prefix_attention`); implements `Decoder`.

    All rows are at the same position of their completions, so new rows are admitted only after all others have ended.
    """

    compact_threshold = 0.125  # the removal of rows copies the keys and values of the others
    can_fork = True

    def __init__(self, module: PreTrainedModel, rows: int) -> None:
        self.module = module
        self.rows = rows
        # Not on a GPU, because `LlamaLayers` needs a second copy of the weights.
        fused = module.device.type == "cpu" and is_llama_like(module)
        self.network = LlamaLayers(module) if fused else OwnForward(module)
        self.layout: _DecodingLayout | None = None

    def free_rows(self) -> int:
        return self.rows if self.layout is None else 0

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], group_size: int, common: int | None = None) -> Tensor:
        hidden_SW, stored = prefill(self.module, prompts, common)
        prompt_of_row = torch.arange(len(prompts), device=self.module.device).repeat_interleave(group_size)
        self.layout = _DecodingLayout(stored, prompt_of_row)
        return self.network.head(hidden_SW)

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        assert self.layout is not None
        return self.network(tokens_R, self.layout.next_positions(), self.layout)

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        assert self.layout is not None
        if len(rows):
            self.layout.select(rows)
        else:
            self.layout = None


class OwnForward:
    """The model's own forward pass."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.base, self.head = module.base_model, cast(nn.Module, module.get_output_embeddings())
        self.packed = PackedLinears(module)

    def __call__(self, tokens_R: Tensor, positions_R: Tensor, layout: Layout) -> Tensor:
        with self.packed:
            return self.head(forward(self.base, tokens_R, positions_R, layout))


class _DecodingLayout:
    """Layout for one new token per row, which attends to its prompt and to the tokens that its row has decoded.

    The KV cache of the completions has up to GROWTH unused positions, which are masked. It grows in blocks, because
    a matrix product with a slice of a larger tensor would copy the slice for every token.
    """

    def __init__(self, stored: PrefillLayout, prompt_of_row: Tensor) -> None:
        self.keys_KSPD, self.values_KSPD = stored.keys, stored.values
        self.lengths_S = torch.tensor(stored.prompt_lengths, device=prompt_of_row.device)
        rows = len(prompt_of_row)
        self.own_keys, self.own_values = (
            [prompt_KSPD.new_empty(prompt_KSPD.shape[0], rows, 0, prompt_KSPD.shape[3]) for prompt_KSPD in tensors]
            for tensors in (stored.keys, stored.values)
        )
        self.decoded = 0
        self.prompt_of_row = prompt_of_row
        self.slots = SharedPrefixAttention(self.lengths_S, prompt_of_row)

    def next_positions(self) -> Tensor:
        """Positions of the tokens about to be fed, for which there is room from now on."""
        if missing := capacity(self.decoded + 1) - self.own_keys[0].shape[2]:
            for tensors in (self.own_keys, self.own_values):
                for layer, tensor in enumerate(tensors):  # one by one: never all of them twice
                    tensors[layer] = F.pad(tensor, (0, 0, 0, missing))
        self.decoded += 1
        positions = torch.arange(self.own_keys[0].shape[2], device=self.prompt_of_row.device)
        self.unwritten_1T = (positions >= self.decoded)[None]
        return self.lengths_S[self.prompt_of_row] + (self.decoded - 1)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, and the prompts that they need. Rows stay ordered by prompt."""
        self.own_keys = [key[:, rows] for key in self.own_keys]
        self.own_values = [value[:, rows] for value in self.own_values]
        prompts, prompt_of_row = self.prompt_of_row[rows].unique(return_inverse=True)
        if len(prompts) < len(self.lengths_S):
            self.lengths_S = self.lengths_S[prompts]
            longest = int(self.lengths_S.max())  # remove columns that are padding in all prompts
            self.keys_KSPD = [key[:, prompts, :longest] for key in self.keys_KSPD]
            self.values_KSPD = [value[:, prompts, :longest] for value in self.values_KSPD]
        self.prompt_of_row = prompt_of_row
        self.slots = SharedPrefixAttention(self.lengths_S, prompt_of_row)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        heads, rows, _ = query.shape
        own_keys, own_values = self.own_keys[layer], self.own_values[layer]
        own_keys[:, :, self.decoded - 1] = key
        own_values[:, :, self.decoded - 1] = value

        by_key_head = query.unflatten(0, (len(key), -1)).transpose(1, 2)
        query_KRMD = torch.mul(by_key_head, scaling, out=query.new_empty(by_key_head.shape))
        out = self.slots.attend(
            query_KRMD,
            self.keys_KSPD[layer],
            self.values_KSPD[layer],
            own_keys,
            own_values,
            self.unwritten_1T,
        )
        return out.transpose(0, 1).reshape(rows, heads, -1)  # values may be narrower than keys
