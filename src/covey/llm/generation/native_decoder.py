"""Decoder of Llama-like models on a CPU with covey's kernels. Its layers are in native_layers.py.

A row has a slot in the KV cache of completions and a pointer to the KV cache of its prompt. Rows may be at different
positions. A row can be removed without copies, and its slot is free for a new row, so a long completion does not block
the rest of the batch. A parked row has its slot, but takes no part in steps until it is brought back. Because tokens
are only appended, it may share the slot with rows that go on.

Shapes: S prompts, P prompt tokens, R rows, N tokens of all rows, W hidden width, H heads, K key-value heads,
D head width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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

# Matrix products of fewer rows are computed in another order.
LEAST_ROWS = 8


@dataclass(frozen=True)
class _SharedPrompt:
    """Keys and values of a prompt in the layout of the kernels."""

    keys: Tensor  # [layers, K, padded P * padded D]
    values: Tensor  # [layers, K, padded P * padded D]
    length: int


@dataclass(frozen=True, eq=False)
class ParkedRow:
    """A row outside of the batch, with its keys and values."""

    prompt: _SharedPrompt
    slot: int
    decoded: int  # number of own tokens


@dataclass(frozen=True, eq=False)
class KeptRow:
    """A copy of a row's keys and values, which stays when the decoder is gone."""

    prompt: _SharedPrompt
    keys: Tensor  # of its own tokens, [layers, K, padded tokens * padded D]
    values: Tensor
    decoded: int  # number of own tokens

    @property
    def own_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the prompt, which other rows may share."""
        return self.prompt.keys.nbytes + self.prompt.values.nbytes


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

    def __init__(
        self, module: PreTrainedModel, kernels: Kernels, rows: int, max_new_tokens: int, chunk: int | None = None
    ) -> None:
        """
        Args:
            module, kernels: a Llama-like model and the kernels for its dtype.
            rows: R, parked ones included.
            max_new_tokens: number of own tokens that rows have room for at first.
            chunk: maximal number of tokens that `extend` feeds at once, if it is larger than `rows`. The bits of a row
                then do not depend on the number of other rows. None: `extend` is not used.
        """
        self.module = module
        self.base = cast(Any, module.base_model)  # with `embed_tokens`, `rotary_emb`, `layers` and `norm`
        self.kernels = kernels
        self.chunk = max(rows, chunk or 0)
        self.stack = make_stack(module, kernels, self.chunk, LEAST_ROWS if chunk else 1)
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
        self.parked = Counter[int]()  # number of parked rows in each slot
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
        self.free += sorted(set(self.slots_R.tolist()) - set(slots) - self.parked.keys(), reverse=True)
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
        self.make_room(int(self.decoded_R.max()) + 1)
        logits_RV = self._feed(tokens_R, slice(None), self.decoded_R)
        self.decoded_R += 1
        return logits_RV

    @torch.inference_mode()
    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Feed one or more tokens to every row; returns logits_RV of the token after the last."""
        counts_R = torch.tensor([len(of_row) for of_row in tokens])
        self.make_room(int((self.decoded_R + counts_R).max()))
        tokens_N = torch.tensor([token for of_row in tokens for token in of_row])
        rows_N = torch.arange(len(tokens)).repeat_interleave(counts_R)
        ends_R = counts_R.cumsum(0)
        offsets_N = torch.arange(len(tokens_N)) - (ends_R - counts_R)[rows_N]
        decoded_N = (self.decoded_R[rows_N] + offsets_N).int()
        logits_RV: list[Tensor] = []
        for begin in range(0, len(tokens_N), self.chunk):
            part = slice(begin, begin + self.chunk)
            logits_CV = self._feed(tokens_N[part], rows_N[part], decoded_N[part])
            last = ends_R[(ends_R > begin) & (ends_R <= begin + self.chunk)] - 1 - begin
            logits_RV.append(logits_CV[last])
        self.decoded_R += counts_R.int()
        return torch.cat(logits_RV)

    def park(self, row: int) -> ParkedRow:
        """Keep the keys and values of a row, also if `select` removes it from the batch; repeated calls are counted."""
        slot = int(self.slots_R[row])
        self.parked[slot] += 1
        return ParkedRow(self.prompts[row], slot, int(self.decoded_R[row]))

    def release(self, row: ParkedRow) -> None:
        """Forget a parked row; its slot is free if no other row has it."""
        if not self._unpark(row):
            self.free.append(row.slot)

    @torch.inference_mode()
    def bring_back(self, row: ParkedRow) -> None:
        """Append a parked row to the batch. It is copied if another row has its slot."""
        slot = row.slot
        if self._unpark(row):
            slot = self.free.pop()
            self._copy(row.slot, slot, row.decoded)
        self.append(row.prompt, slot, row.decoded)

    def append(self, prompt: _SharedPrompt, slot: int, decoded: int) -> None:
        """Append a row whose own keys and values are in a slot to the batch."""
        self.prompts.append(prompt)
        self.slots_R = torch.cat([self.slots_R, torch.tensor([slot], dtype=torch.int32)])
        self.decoded_R = torch.cat([self.decoded_R, torch.tensor([decoded], dtype=torch.int32)])
        self._update_prompt_pointers()

    def _unpark(self, row: ParkedRow) -> bool:
        """True if another row has the slot of this parked row, which is none any more."""
        self.parked[row.slot] -= 1
        if self.parked[row.slot]:
            return True
        del self.parked[row.slot]
        return row.slot in self.slots_R.tolist()

    def _feed(self, tokens_N: Tensor, rows_N: Tensor | slice, decoded_N: Tensor) -> Tensor:
        """logits_NV after tokens of these rows, each of which has `decoded_N` own tokens before it."""
        lengths, slots = self.lengths_R[rows_N], self.slots_R[rows_N]
        keys, values = self.keys_R[rows_N], self.values_R[rows_N]
        hidden_RW = self.base.embed_tokens(tokens_N).float()
        angles = self.base.rotary_emb(hidden_RW, (lengths + decoded_N)[None].long())
        cosine, sine = (part.to(self.kernels.dtype).contiguous() for part in angles)
        args = AttentionArgs(
            cosine=cosine.data_ptr(), sine=sine.data_ptr(), prompt_keys=keys.data_ptr(),
            prompt_values=values.data_ptr(), prompt_lengths=lengths.data_ptr(),
            slots=slots.data_ptr(), decoded=decoded_N.data_ptr(),
            rows=len(tokens_N), heads=self.heads.queries, kv_heads=self.heads.keys, head_dim=self.heads.width,
            capacity=self.capacity, threads=torch.get_num_threads(), scaling=self.heads.width**-0.5,
            epsilon=self.epsilon,
        )  # fmt: skip
        return self.stack.step(hidden_RW, args, self.own_keys, self.own_values)

    def make_room(self, tokens: int) -> None:
        """Give every row room for at least so many own tokens."""
        if tokens <= self.capacity:
            return
        written = self.own_keys.shape[-1]
        self.capacity = capacity(max(tokens, 2 * self.capacity))
        for name in ("own_keys", "own_values"):
            old = getattr(self, name)
            new = in_huge_pages(old.new_empty(*old.shape[:-1], self.capacity * padded(self.heads.width)))
            new[..., :written] = old
            setattr(self, name, new)

    def _copy(self, slot: int, into: int, tokens: int) -> None:
        written = padded(tokens) * padded(self.heads.width)
        for own in (self.own_keys, self.own_values):
            own[:, into, :, :written] = own[:, slot, :, :written]

    def _update_prompt_pointers(self) -> None:
        """Update the pointers to every row's prompt, and its length, for the kernel."""
        self.keys_R = torch.tensor([shared.keys.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.values_R = torch.tensor([shared.values.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.lengths_R = torch.tensor([shared.length for shared in self.prompts], dtype=torch.int32)


@torch.inference_mode()
def keep(decoder: NativeDecoder, row: int) -> KeptRow:
    """A copy of a row."""
    slot, decoded = int(decoder.slots_R[row]), int(decoder.decoded_R[row])
    written = padded(decoded) * padded(decoder.heads.width)
    keys, values = (own[:, slot, :, :written].clone() for own in (decoder.own_keys, decoder.own_values))
    return KeptRow(decoder.prompts[row], keys, values, decoded)


@torch.inference_mode()
def restore(decoder: NativeDecoder, row: KeptRow) -> None:
    """Append a kept row, which may be that of another decoder, to the batch."""
    slot = decoder.free.pop()
    decoder.make_room(row.decoded)
    for own, kept in ((decoder.own_keys, row.keys), (decoder.own_values, row.values)):
        own[:, slot, :, : kept.shape[-1]] = kept
    decoder.append(row.prompt, slot, row.decoded)
