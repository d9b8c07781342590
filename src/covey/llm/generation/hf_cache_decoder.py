"""Decoders on transformers' own forward pass, for models whose attention takes no layout. They repeat the prompt for
every row.

Shapes: S prompts, R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.generation.prepacked_linear import PackedLinears
from covey.llm.model.architecture import vocabulary_of
from covey.llm.model.plain_forward import accepted


class CacheDecoder:
    """Keys and values in a cache of transformers, with the prompt repeated for every row.

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
