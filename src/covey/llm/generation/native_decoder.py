"""Decoder of Llama-like models on a CPU with covey's kernels. Its layers are in native_layers.py.

A row has a slot in the KV cache of completions and a pointer to the KV cache of its prompt. Rows may be at different
positions. A row can be removed without copies, and its slot is free for a new row, so a long completion does not block
the rest of the batch.

Shapes: S prompts, P prompt tokens, R rows, W hidden width, H heads, K key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.generation.decoder import prefill
from covey.llm.generation.native_layers import make_stack
from covey.llm.model.architecture import Heads
from covey.llm.native.bindings import AttentionArgs, Kernels, padded
from covey.runtime.device import in_huge_pages


@dataclass(frozen=True)
class _SharedPrompt:
    """Keys and values of a prompt in the layout of the kernels."""

    keys: Tensor  # [layers, K, padded P * padded D]
    values: Tensor  # [layers, K, padded P * padded D]
    length: int


def capacity(max_new_tokens: int) -> int:
    """Number of own tokens that a row has room for."""
    return padded(max_new_tokens)


def cache_bytes(token_bytes: int, rows: int, max_new_tokens: int, prompts: int, prompt_tokens: int) -> int:
    """Bytes of the keys and values of all rows and of their prompts.

    The padding of heads and prompts is not counted, so the number is exact if D and `prompt_tokens` are multiples of
    `PAD`.

    Args:
        token_bytes: of one token, see `decoder.token_bytes`.
        rows: R.
        max_new_tokens: limit of a row.
        prompts, prompt_tokens: S and P.
    """
    return token_bytes * (rows * capacity(max_new_tokens) + prompts * prompt_tokens)


class NativeDecoder:
    """Decoder whose rows share their prompts' keys and values; implements `Decoder`."""

    compact_threshold = 0.0  # the removal of a row needs no copy
    can_fork = True

    def __init__(self, module: PreTrainedModel, kernels: Kernels, rows: int, max_new_tokens: int) -> None:
        self.module = module
        self.base = cast(Any, module.base_model)  # with `embed_tokens`, `rotary_emb`, `layers` and `norm`
        self.kernels = kernels
        self.stack = make_stack(module, kernels, rows)
        self.heads = Heads.of(module)
        self.epsilon = module.config.get_text_config().rms_norm_eps
        self.capacity = capacity(max_new_tokens)
        layers, dtype = len(self.base.layers), kernels.dtype
        own = layers, rows, self.heads.keys, self.capacity * padded(self.heads.width)
        self.own_keys, self.own_values = (in_huge_pages(torch.empty(own, dtype=dtype)) for _ in range(2))
        self.free = list(range(rows))[::-1]
        self.prompts: list[_SharedPrompt] = []  # of every row
        self.slots_R = torch.empty(0, dtype=torch.int32)
        self.decoded_R = torch.empty(0, dtype=torch.int32)
        self._update_prompt_pointers()

    def free_rows(self) -> int:
        return len(self.free)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], group_size: int, common: int | None = None) -> Tensor:
        hidden_SW, layout = prefill(self.module, prompts, common)
        for prompt, length in enumerate(layout.prompt_lengths):
            shape = len(layout.keys), self.heads.keys, padded(length) * padded(self.heads.width)
            keys, values = hidden_SW.new_empty(2, *shape)
            shared = _SharedPrompt(keys, values, length)
            for layer, (key_KSPD, value_KSPD) in enumerate(zip(layout.keys, layout.values, strict=True)):
                key, value = (part[:, prompt, :length].contiguous() for part in (key_KSPD, value_KSPD))
                self.kernels.store_prompt_kv(key, value, shared.keys[layer], shared.values[layer])
            self.prompts += [shared] * group_size
        slots = [self.free.pop() for _ in range(len(prompts) * group_size)]
        self.slots_R = torch.cat([self.slots_R, torch.tensor(slots, dtype=torch.int32)])
        self.decoded_R = torch.cat([self.decoded_R, torch.zeros(len(slots), dtype=torch.int32)])
        self._update_prompt_pointers()
        return self.stack.head(hidden_SW)

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        chosen, slots = rows.tolist(), self.slots_R[rows].tolist()
        self.free += sorted(set(self.slots_R.tolist()) - set(slots), reverse=True)
        self.prompts = [self.prompts[row] for row in chosen]
        self.decoded_R = self.decoded_R[rows]
        for row in range(1, len(chosen)):
            if chosen[row] == chosen[row - 1]:
                slots[row] = self.free.pop()
                self._copy(slots[row - 1], slots[row], int(self.decoded_R[row]))
        self.slots_R = torch.tensor(slots, dtype=torch.int32)
        self._update_prompt_pointers()

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        hidden_RW = self.base.embed_tokens(tokens_R).float()
        angles = self.base.rotary_emb(hidden_RW, (self.lengths_R + self.decoded_R)[None].long())
        cosine, sine = (part.to(self.kernels.dtype).contiguous() for part in angles)
        args = AttentionArgs(
            cosine=cosine.data_ptr(), sine=sine.data_ptr(), prompt_keys=self.keys_R.data_ptr(),
            prompt_values=self.values_R.data_ptr(), prompt_lengths=self.lengths_R.data_ptr(),
            slots=self.slots_R.data_ptr(), decoded=self.decoded_R.data_ptr(),
            rows=len(tokens_R), heads=self.heads.queries, kv_heads=self.heads.keys, head_dim=self.heads.width,
            capacity=self.capacity, threads=torch.get_num_threads(), scaling=self.heads.width**-0.5,
            epsilon=self.epsilon,
        )  # fmt: skip
        logits_RV = self.stack.step(hidden_RW, args, self.own_keys, self.own_values)
        self.decoded_R += 1
        return logits_RV

    def _copy(self, slot: int, into: int, tokens: int) -> None:
        written = padded(tokens) * padded(self.heads.width)
        for own in (self.own_keys, self.own_values):
            own[:, into, :, :written] = own[:, slot, :, :written]

    def _update_prompt_pointers(self) -> None:
        """Update the pointers to every row's prompt, and its length, for the kernel."""
        self.keys_R = torch.tensor([shared.keys.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.values_R = torch.tensor([shared.values.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.lengths_R = torch.tensor([shared.length for shared in self.prompts], dtype=torch.int32)
