"""Decoders on transformers' own forward pass, for models whose attention takes no layout. Every row has its own copy of
the prompt.

Shapes: S prompts, R rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.generation.decoder import PREFILL_TOKENS, PackedLinears
from covey.llm.model.architecture import vocabulary_of
from covey.llm.model.plain_forward import accepted, inputs_of
from covey.runtime.device import device_kind


class CacheDecoder:
    """Decoder with transformers' KV cache, or the state of a recurrent model.

    Rows whose prompts have the same length are decoded together (a cohort), without padding. With `pads`, all rows are
    one cohort and shorter prompts are padded on the left, which is faster but only correct for models that ignore
    masked tokens. Prompts of more than PREFILL_TOKENS together are several cohorts, and a prompt with images is one.
    """

    compact_threshold = 0.125  # the removal of rows copies the state of the others
    can_fork = True
    block = 1

    def __init__(self, module: PreTrainedModel, rows: int, *, pads: bool) -> None:
        self.module = module
        self.rows = rows
        self.pads = pads
        self.packed = PackedLinears(module)
        self.cohorts: list[_Cohort] = []

    def free_rows(self) -> int:
        return 0 if self.cohorts else self.rows

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], group_size: int, common: int | None = None) -> Tensor:
        lengths = [0 if self.pads else len(prompt) for prompt in prompts]
        lengths = [-1 - i if hasattr(prompt, "inputs") else lengths[i] for i, prompt in enumerate(prompts)]
        numbers = torch.arange(len(prompts) * group_size, device=self.module.device).view(len(prompts), group_size)
        logits_by_prompt: dict[int, Tensor] = {}
        for length in sorted(set(lengths)):
            alike = [index for index, other in enumerate(lengths) if other == length]
            for chosen in fed_together(alike, max(len(prompts[index]) for index in alike), self.module):
                cohort = _Cohort(self.module, numbers[chosen].flatten(), pads=self.pads)
                logits_SV = cohort.prefill([prompts[index] for index in chosen])
                cohort.select(torch.arange(len(chosen), device=self.module.device).repeat_interleave(group_size))
                logits_by_prompt |= zip(chosen, logits_SV, strict=True)
                self.cohorts.append(cohort)
        return torch.stack([logits_by_prompt[index] for index in range(len(prompts))])

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
        """Memory of all tensors in the caches."""
        return sum(_count_bytes(cohort.cache, set()) for cohort in self.cohorts)


def fed_together(rows: list[int], length: int, module: PreTrainedModel) -> list[list[int]]:
    """Parts of rows of up to `length` tokens, each of at most PREFILL_TOKENS together, or of one row."""
    count = max(PREFILL_TOKENS[device_kind(module.device)] // length, 1)
    return [rows[begin : begin + count] for begin in range(0, len(rows), count)]


# Names of the cache in the arguments and outputs of transformers' models.
CACHE_NAMES = ("past_key_values", "cache_params", "state")
POSITIONS = "rope_deltas"


class _Cohort:
    """Rows of a `CacheDecoder` that share a cache of transformers.

    Shapes: C rows of the cohort, S its prompts, P tokens of the longest one.
    """

    def __init__(self, module: PreTrainedModel, numbers_C: Tensor, *, pads: bool) -> None:
        self.module = module
        self.numbers_C = numbers_C  # indices of the cohort's rows in the decoder
        self.pads = pads
        self.cache: Any = None
        # Some models keep on themselves how far the positions of a row are from its number of tokens.
        self.models = [part for part in module.modules() if hasattr(part, POSITIONS)]
        self.positions: list[Any] = [None for _ in self.models]
        self.mask_CL: Tensor | None = None  # 1 at tokens, 0 at padding

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """logits_SV of the token after each prompt."""
        device = self.module.device
        width = max(len(prompt) for prompt in prompts)
        tokens_SP = torch.tensor([[*[0] * (width - len(prompt)), *prompt] for prompt in prompts], device=device)
        if not self.pads:
            return self._forward(tokens_SP, **inputs_of(prompts[0], width, self.module))
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
        """Keep only these rows; an index may occur several times."""
        if self.mask_CL is not None:
            self.mask_CL = self.mask_CL[rows]
        if isinstance(self.cache, list):  # of tensors [rows, ...]
            self.cache = [state[rows] for state in self.cache]
        else:
            self.cache.reorder_cache(rows)

    def _forward(self, tokens: Tensor, positions: Tensor | None = None, **inputs: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1, **inputs}
        if positions is not None:
            arguments |= {"attention_mask": self.mask_CL, "position_ids": positions}
        if self.cache is not None:
            arguments |= dict.fromkeys(CACHE_NAMES, self.cache)
        for part, kept in zip(self.models, self.positions, strict=True):
            setattr(part, POSITIONS, kept)
        output = self.module(input_ids=tokens, **accepted(self.module, **arguments))
        self.positions = [getattr(part, POSITIONS) for part in self.models]
        self.cache = next(output[name] for name in CACHE_NAMES if output.get(name) is not None)
        return output.logits[:, -1]


def _count_bytes(state: Any, seen: set[int]) -> int:
    """Memory of all tensors in an object and in the objects that it contains; each is counted once."""
    if id(state) in seen:
        return 0
    seen.add(id(state))
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    parts = state if isinstance(state, (list, tuple, dict)) else getattr(state, "__dict__", {})
    parts = parts.values() if isinstance(parts, dict) else parts
    return sum(_count_bytes(part, seen) for part in parts)


class FullForwardDecoder:
    """Decoder without a cache: every row is fed completely for every token.

    For models whose cache is missing or gives other logits. Rows of the same length are fed together, without padding.
    The cost of a completion is quadratic in its length.
    """

    compact_threshold = 0.0
    can_fork = True
    block = 1

    def __init__(self, module: PreTrainedModel, rows: int) -> None:
        self.module = module
        self.rows = rows
        self.tokens: list[list[int]] = []  # of every row

    def free_rows(self) -> int:
        return self.rows - len(self.tokens)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], group_size: int, common: int | None = None) -> Tensor:
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
        """Estimated memory of a forward pass: 16 hidden vectors and the logits of every token."""
        config = self.module.config.get_text_config()
        widths = 16 * config.hidden_size + vocabulary_of(self.module)
        return sum(map(len, self.tokens)) * widths * self.module.dtype.itemsize

    def _forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        logits_by_prompt: dict[int, Tensor] = {}
        for length in sorted({len(row) for row in rows}):
            alike = [index for index, row in enumerate(rows) if len(row) == length]
            for chosen in fed_together(alike, length, self.module):
                tokens = torch.tensor([rows[index] for index in chosen], device=self.module.device)
                known = accepted(self.module, use_cache=False, logits_to_keep=1)
                logits_by_prompt |= zip(chosen, self.module(input_ids=tokens, **known).logits[:, -1], strict=True)
        return torch.stack([logits_by_prompt[index] for index in range(len(rows))])
