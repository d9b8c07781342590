"""Decoders: what the sampler steps forward token by token.

A decoder is given prompts, each shared by the rows of a group, and yields the logits of every row's next token. The
ones here are torch alone and serve any device. A faster one, for CPUs, is in `native_decoder.py`.

Shapes: S prompts, P longest prompt, R rows, T tokens decoded so far, H heads, K key-value heads, D head width,
V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.generation.llama_layers import LlamaLayers
from covey.llm.generation.prepacked_linear import PackedLinears
from covey.llm.model.architecture import is_llama_like, vocabulary_of
from covey.llm.model.plain_forward import accepted
from covey.llm.model.prefix_attention import Layout, PackedLayout, SharedPrefixAttention, forward
from covey.llm.native.bindings import PAD

GROWTH = PAD  # tokens for which rows are given room together, as in the kernels (`memory/estimate.py` counts on it)


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


class SharedPrefixDecoder:
    """Keys and values of a prompt are computed and stored once for its group.

    For any transformers decoder whose attention takes a layout (see `prefix_attention`). All rows are at the same
    position of their completions, so new rows are admitted when the old ones have ended.
    """

    compact_threshold = 0.125  # a departure copies the keys of the rows that stay
    can_fork = True

    def __init__(self, module: PreTrainedModel, rows: int) -> None:
        self.module = module
        self.rows = rows
        # On a GPU, joining what shares an input would take a second copy of the weights.
        lean = module.device.type == "cpu" and is_llama_like(module)
        self.network = LlamaLayers(module) if lean else OwnForward(module)
        self.layout: _DecodingLayout | None = None

    def free_rows(self) -> int:
        return self.rows if self.layout is None else 0

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], group_size: int) -> Tensor:
        hidden_SW, stored = prefill(self.module, prompts)
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
        if self.decoded == self.own_keys[0].shape[2]:
            for tensors in (self.own_keys, self.own_values):
                for layer, tensor in enumerate(tensors):  # one by one: never all of them twice
                    tensors[layer] = F.pad(tensor, (0, 0, 0, GROWTH))
        self.decoded += 1
        room = torch.arange(self.own_keys[0].shape[2], device=self.prompt_of_row.device)
        self.unwritten_1T = (room >= self.decoded)[None]
        return self.lengths_S[self.prompt_of_row] + (self.decoded - 1)

    def select(self, rows: Tensor) -> None:
        """Drop every other row, and the prompts that no row is left of. Rows stay ordered by prompt."""
        self.own_keys = [key[:, rows] for key in self.own_keys]
        self.own_values = [value[:, rows] for value in self.own_values]
        prompts, prompt_of_row = self.prompt_of_row[rows].unique(return_inverse=True)
        if len(prompts) < len(self.lengths_S):
            self.lengths_S = self.lengths_S[prompts]
            longest = int(self.lengths_S.max())  # what is padding in all of them is not masked
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


class CacheDecoder:
    """For every other model that has a cache: transformers' own, with the prompt repeated for every row.

    Rows whose prompts have the same length are decoded together (a cohort), without padding. With `pads`, all rows are,
    and shorter prompts are padded on the left: faster, but only right for models that ignore what is masked.
    """

    compact_threshold = 0.125  # a departure copies the state of the rows that stay
    can_fork = True

    def __init__(self, module: PreTrainedModel, rows: int, *, pads: bool) -> None:
        self.module = module
        self.rows = rows
        self.pads = pads
        self.packed = PackedLinears(module)
        self.cohorts: list[_Cohort] = []

    def free_rows(self) -> int:
        return 0 if self.cohorts else self.rows

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], group_size: int) -> Tensor:
        lengths = [0 if self.pads else len(prompt) for prompt in prompts]
        numbers = torch.arange(len(prompts) * group_size, device=self.module.device).view(len(prompts), group_size)
        found: dict[int, Tensor] = {}
        for length in sorted(set(lengths)):
            chosen = [place for place, other in enumerate(lengths) if other == length]
            cohort = _Cohort(self.module, numbers[chosen].flatten(), pads=self.pads)
            logits_SV = cohort.begin([prompts[place] for place in chosen])
            cohort.select(torch.arange(len(chosen), device=self.module.device).repeat_interleave(group_size))
            found |= zip(chosen, logits_SV, strict=True)
            self.cohorts.append(cohort)
        return torch.stack([found[place] for place in range(len(prompts))])

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        with self.packed:
            parts = [cohort.step(tokens_R[cohort.numbers_C]) for cohort in self.cohorts]
        if len(parts) == 1:
            return parts[0]
        logits_RV = parts[0].new_empty(len(tokens_R), parts[0].shape[1])
        for cohort, logits_CV in zip(self.cohorts, parts, strict=True):
            logits_RV[cohort.numbers_C] = logits_CV
        return logits_RV

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        new = torch.arange(len(rows), device=rows.device)
        for cohort in self.cohorts:
            inside_RC = rows[:, None] == cohort.numbers_C
            kept = inside_RC.any(dim=1)
            cohort.numbers_C = new[kept]
            if len(cohort.numbers_C):
                cohort.select(inside_RC[kept].int().argmax(dim=1))
        self.cohorts = [cohort for cohort in self.cohorts if len(cohort.numbers_C)]

    def state_bytes(self) -> int:
        """Of all tensors that the rows' caches hold."""
        return sum(_bytes_in(cohort.cache, set()) for cohort in self.cohorts)


# Under which name a model returns its cache and takes it again.
CACHE_NAMES = ("past_key_values", "cache_params", "state")


class _Cohort:
    """Rows of a `CacheDecoder` that share a cache of transformers.

    Shapes: C rows of the cohort, S its prompts, P tokens of the longest one.
    """

    def __init__(self, module: PreTrainedModel, numbers_C: Tensor, *, pads: bool) -> None:
        self.module = module
        self.numbers_C = numbers_C  # of its rows, among all of the decoder
        self.pads = pads
        self.cache: Any = None
        self.mask_CL: Tensor | None = None  # which tokens are not padding

    def begin(self, prompts: list[list[int]]) -> Tensor:
        """logits_SV of the token after each prompt."""
        device = self.module.device
        width = max(len(prompt) for prompt in prompts)
        tokens_SP = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        if not self.pads:
            return self._forward(tokens_SP)
        lengths_S = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.mask_CL = (torch.arange(width, device=device) >= width - lengths_S[:, None]).long()
        return self._forward(tokens_SP, (self.mask_CL.cumsum(1) - 1).clamp(min=0))

    def step(self, tokens_C: Tensor) -> Tensor:
        """logits_CV of the next token."""
        if self.mask_CL is None:
            return self._forward(tokens_C[:, None])
        self.mask_CL = torch.cat([self.mask_CL, self.mask_CL.new_ones(len(tokens_C), 1)], dim=1)
        return self._forward(tokens_C[:, None], self.mask_CL.sum(dim=1, keepdim=True) - 1)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, some of them perhaps several times."""
        if self.mask_CL is not None:
            self.mask_CL = self.mask_CL[rows]
        if isinstance(self.cache, list):  # of tensors, the rows first
            self.cache = [state[rows] for state in self.cache]
        else:
            self.cache.reorder_cache(rows)

    def _forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        wanted: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
        if positions is not None:
            wanted |= {"attention_mask": self.mask_CL, "position_ids": positions}
        if self.cache is not None:
            wanted |= dict.fromkeys(CACHE_NAMES, self.cache)
        output = self.module(input_ids=tokens, **accepted(self.module, **wanted))
        self.cache = next(output[name] for name in CACHE_NAMES if output.get(name) is not None)
        return output.logits[:, -1]


def _bytes_in(state: Any, seen: set[int]) -> int:
    """Of the tensors that an object holds, whatever holds them."""
    if id(state) in seen:
        return 0
    seen.add(id(state))
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    parts = state if isinstance(state, (list, tuple, dict)) else getattr(state, "__dict__", {})
    parts = parts.values() if isinstance(parts, dict) else parts
    return sum(_bytes_in(part, seen) for part in parts)


class FullForwardDecoder:
    """For models without a cache that can be used: every row is fed whole for every token.

    Rows of the same length are fed together, without padding. The cost grows with the square of the length.
    """

    compact_threshold = 0.0
    can_fork = True

    def __init__(self, module: PreTrainedModel, rows: int) -> None:
        self.module = module
        self.rows = rows
        self.tokens: list[list[int]] = []  # of every row

    def free_rows(self) -> int:
        return self.rows - len(self.tokens)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], group_size: int) -> Tensor:
        self.tokens += [list(prompt) for prompt in prompts for _ in range(group_size)]
        return self._forward(prompts)

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        for row, token in zip(self.tokens, tokens_R.tolist(), strict=True):
            row.append(token)
        return self._forward(self.tokens)

    def select(self, rows: Tensor) -> None:
        self.tokens = [list(self.tokens[row]) for row in rows.tolist()]

    def state_bytes(self) -> int:
        """Of what a forward pass holds at a time, roughly: some vectors of every token."""
        config = self.module.config.get_text_config()
        widths = 16 * config.hidden_size + vocabulary_of(self.module)
        return sum(map(len, self.tokens)) * widths * self.module.dtype.itemsize

    def _forward(self, rows: list[list[int]]) -> Tensor:
        found: dict[int, Tensor] = {}
        for length in sorted({len(row) for row in rows}):
            chosen = [place for place, row in enumerate(rows) if len(row) == length]
            tokens = torch.tensor([rows[place] for place in chosen], device=self.module.device)
            known = accepted(self.module, use_cache=False, logits_to_keep=1)
            found |= zip(chosen, self.module(input_ids=tokens, **known).logits[:, -1], strict=True)
        return torch.stack([found[place] for place in range(len(rows))])
