"""Decoders: what the sampler steps forward token by token.

A decoder is given prompts, each shared by the rows of a group, and yields the logits of every row's next token. The
two here are torch alone and serve any device. Faster ones are in `native/decoder.py`, for CPUs, and `graphs.py`, for
GPUs.

Shapes: S prompts, P longest prompt, R rows, T tokens decoded so far, H heads, K key-value heads, D head width,
V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from covey.llm.attention import Layout, PackedLayout, PromptSlots, forward
from covey.llm.families import is_llama_like
from covey.llm.layers import LlamaLayers
from covey.llm.native.library import PAD
from covey.llm.packed import PackedLinears

GROWTH = PAD  # tokens for which rows are given room together, as in the kernels (memory.py counts on it)


class Decoder(Protocol):
    """The rows of some groups, decoded together."""

    patience: float  # what share of its rows must have ended before `keep` is worth its cost
    branches: bool  # whether `keep` makes two rows of one that is named twice

    def room(self) -> int:
        """How many rows may be added now."""

    def add(self, prompts: list[list[int]], group_size: int) -> Tensor:
        """Take `group_size` new rows for each prompt, behind the others; logits_SV of the token after each prompt."""

    def step(self, tokens_R: Tensor) -> Tensor:
        """Feed one token to every row; logits_RV of the next."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only (int64 index, ascending). Where it `branches`, one named twice becomes two."""


class SharedPrefixDecoder:
    """Keys and values of a prompt are computed and stored once for its group.

    For any transformers decoder whose attention takes a layout (see `attention`). All rows stand at the same place of
    their completions, so new ones come when the old ones are done.
    """

    patience = 0.125  # a departure copies the keys of the rows that stay
    branches = True

    def __init__(self, module: PreTrainedModel, rows: int) -> None:
        self.module = module
        self.rows = rows
        # On a GPU, joining what shares an input would take a second copy of the weights.
        lean = module.device.type == "cpu" and is_llama_like(module)
        self.network = LlamaLayers(module) if lean else OwnForward(module)
        self.layout: _DecodingLayout | None = None

    def room(self) -> int:
        return self.rows if self.layout is None else 0

    @torch.inference_mode()
    def add(self, prompts: list[list[int]], group_size: int) -> Tensor:
        hidden_SW, stored = prefill(self.module, prompts)
        prompt_of_row = torch.arange(len(prompts), device=self.module.device).repeat_interleave(group_size)
        self.layout = _DecodingLayout(stored, prompt_of_row)
        return self.network.head(hidden_SW)

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        assert self.layout is not None
        return self.network(tokens_R, self.layout.next_positions(), self.layout)

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        assert self.layout is not None
        if len(rows):
            self.layout.keep(rows)
        else:
            self.layout = None


class OwnForward:
    """The model's own forward."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.base, self.head = module.base_model, cast(nn.Module, module.get_output_embeddings())
        self.packed = PackedLinears(module)

    def __call__(self, tokens_R: Tensor, positions_R: Tensor, layout: Layout) -> Tensor:
        with self.packed:
            return self.head(forward(self.base, tokens_R, positions_R, layout))


def prefill(module: PreTrainedModel, prompts: list[list[int]]) -> tuple[Tensor, PrefillLayout]:
    """hidden_SW of the last token of each prompt, and the layout that remembers keys and values of all of them."""
    layout = PrefillLayout(prompts, device=module.device)
    hidden_NW = forward(module.base_model, layout.tokens, layout.positions, layout)
    return hidden_NW[layout.prompt_ends.to(module.device)], layout


class PrefillLayout(PackedLayout):
    """Prompts alone; remembers their keys and values."""

    keeps_prompts = True

    def __init__(self, prompts: list[list[int]], device: torch.device) -> None:
        super().__init__(prompts, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def keep_prompt(self, layer: int, key_KSPD: Tensor, value_KSPD: Tensor) -> None:
        assert layer == len(self.keys)
        self.keys.append(key_KSPD.contiguous())
        self.values.append(value_KSPD.contiguous())


class _DecodingLayout:
    """One new token per row, which sees its prompt and what its row has decoded so far.

    Keys and values of the rows' own tokens have room for up to GROWTH more, which a mask hides: products want whole
    tensors, and would copy a part of a larger one at every token.
    """

    def __init__(self, stored: PrefillLayout, prompt_of_row: Tensor) -> None:
        self.keys_KSPD, self.values_KSPD = stored.keys, stored.values
        self.lengths_S = torch.tensor(stored.prompt_lengths, device=prompt_of_row.device)
        first = stored.keys[0]
        nothing = first.new_empty(first.shape[0], len(prompt_of_row), 0, first.shape[3])
        self.own_keys = [nothing for _ in stored.keys]
        self.own_values = [nothing for _ in stored.keys]
        self.decoded = 0
        self.prompt_of_row = prompt_of_row
        self.slots = PromptSlots(self.lengths_S, prompt_of_row)

    def next_positions(self) -> Tensor:
        """Positions of the tokens about to be fed, for which there is room from now on."""
        if self.decoded == self.own_keys[0].shape[2]:
            for tensors in (self.own_keys, self.own_values):
                for layer, tensor in enumerate(tensors):  # one by one: never all of them twice
                    tensors[layer] = F.pad(tensor, (0, 0, 0, GROWTH))
        self.decoded += 1
        room = torch.arange(self.own_keys[0].shape[2], device=self.prompt_of_row.device)
        self.unwritten_1T = (room >= self.decoded)[None]
        return self.lengths_S[self.prompt_of_row] + (self.decoded - 1)

    def keep(self, rows: Tensor) -> None:
        """Drop every other row, and the prompts that no row is left of. Rows stay ordered by prompt."""
        self.own_keys = [key[:, rows] for key in self.own_keys]
        self.own_values = [value[:, rows] for value in self.own_values]
        prompts, prompt_of_row = self.prompt_of_row[rows].unique(return_inverse=True)
        if len(prompts) < len(self.lengths_S):
            self.lengths_S = self.lengths_S[prompts]
            longest = int(self.lengths_S.max())  # what is padding in every prompt that is left must go: nobody masks it
            self.keys_KSPD = [key[:, prompts, :longest] for key in self.keys_KSPD]
            self.values_KSPD = [value[:, prompts, :longest] for value in self.values_KSPD]
        self.prompt_of_row = prompt_of_row
        self.slots = PromptSlots(self.lengths_S, prompt_of_row)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        heads, rows, width = query.shape
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
        return out.transpose(0, 1).reshape(rows, heads, width)


class CacheDecoder:
    """For every other decoder: transformers' own cache, prompts padded on the left and repeated for every row."""

    patience = 0.125  # a departure copies the keys of the rows that stay
    branches = True

    def __init__(self, module: PreTrainedModel, rows: int) -> None:
        self.module = module
        self.rows = rows
        self.packed = PackedLinears(module)
        self.cache: DynamicCache | None = None

    def room(self) -> int:
        return self.rows if self.cache is None else 0

    @torch.inference_mode()
    def add(self, prompts: list[list[int]], group_size: int) -> Tensor:
        device = self.module.device
        width = max(len(prompt) for prompt in prompts)
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        attended = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self.mask = torch.tensor(attended, device=device)
        self.cache = DynamicCache(config=self.module.config)
        logits_SV = self._forward(torch.tensor(padded, device=device), (self.mask.cumsum(1) - 1).clamp(min=0))
        prompt_of_row = torch.arange(len(prompts), device=device).repeat_interleave(group_size)
        self.cache.batch_select_indices(prompt_of_row)
        self.mask = self.mask[prompt_of_row]
        return logits_SV

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens_R), 1)], dim=1)
        with self.packed:
            return self._forward(tokens_R[:, None], self.mask.sum(dim=1, keepdim=True) - 1)

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        assert self.cache is not None
        if len(rows):
            self.cache.batch_select_indices(rows)
            self.mask = self.mask[rows]
        else:
            self.cache = None

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        output = self.module(
            input_ids=tokens,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
