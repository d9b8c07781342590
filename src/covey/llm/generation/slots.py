"""What decoders with covey's kernels share: rows that are slots of one KV cache, and may be parked, kept and copied.

A row has a slot in the KV cache of completions and a pointer to the KV cache of its prompt. Rows may be at different
positions. A row can be removed without copies, and its slot is free for a new row, so a long completion does not block
the rest of the batch. A parked row has its slot, but takes no part in steps until it is brought back. Because tokens
are only appended, it may share the slot with rows that go on.

Shapes: S prompts, P prompt tokens, R rows, N tokens of all rows, K key-value heads, D head width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.generation.decoder import prefill_parts
from covey.llm.model.architecture import Heads
from covey.runtime.device import in_huge_pages


@dataclass(frozen=True)
class SharedPrompt:
    """Keys and values of a prompt in the layout of the kernels."""

    keys: Tensor  # [layers, K, padded P * padded D]
    values: Tensor  # [layers, K, padded P * padded D]
    length: int


@dataclass(frozen=True, eq=False)
class ParkedRow:
    """A row outside of the batch, with its keys and values."""

    prompt: SharedPrompt
    slot: int
    decoded: int  # number of own tokens


@dataclass(frozen=True, eq=False)
class KeptRow:
    """A copy of a row's keys and values, which stays when the decoder is gone."""

    prompt: SharedPrompt
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


class SlotDecoder(ABC):
    """Decoder whose rows share their prompts' keys and values; implements `Decoder`.

    Decoders of conversations are of this class: they can `extend` rows by the tokens of replies, and park them.
    """

    compact_threshold = 0.0  # the removal of a row needs no copy
    can_fork = True
    block = 1
    padding: int  # the kernels pad D and the tokens of a row to multiples of it

    def __init__(
        self, module: PreTrainedModel, kernels: Any, rows: int, max_new_tokens: int, chunk: int, further_slots: int = 0
    ) -> None:
        """
        Args:
            module, kernels: a Llama-like model and the kernels for its dtype.
            rows: R, parked ones included.
            max_new_tokens: number of own tokens that rows have room for at first.
            chunk: maximal number of tokens that are fed at once, at least R.
            further_slots: number of slots that no row gets.
        """
        self.module, self.kernels, self.chunk = module, kernels, chunk
        self.base = cast(Any, module.base_model)  # with `embed_tokens`, `rotary_emb`, `layers` and `norm`
        self.heads = Heads.of(module)
        self.epsilon: float = module.config.get_text_config().rms_norm_eps
        self.capacity = self._padded(max_new_tokens)
        own = len(self.base.layers), rows + further_slots, self.heads.keys, self._numbers(max_new_tokens)
        self.own_keys, self.own_values = (
            in_huge_pages(torch.empty(own, dtype=module.dtype, device=module.device)) for _ in range(2)
        )
        self.free = list(range(rows))[::-1]
        self.prompts: list[SharedPrompt] = []  # of every row
        self.slots_R = torch.empty(0, dtype=torch.int32)
        self.decoded_R = torch.empty(0, dtype=torch.int32)
        self.parked = Counter[int]()  # number of parked rows in each slot
        self._update_prompt_pointers()

    def free_rows(self) -> int:
        return len(self.free)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], group_size: int, common: int | None = None) -> Tensor:
        logits: list[Tensor] = []
        for hidden_SW, layout in prefill_parts(self.module, prompts, common):
            for prompt, length in enumerate(layout.prompt_lengths):
                keys, values = hidden_SW.new_empty(2, len(layout.keys), self.heads.keys, self._numbers(length))
                shared = SharedPrompt(keys, values, length)
                for layer, (key_KSPD, value_KSPD) in enumerate(zip(layout.keys, layout.values, strict=True)):
                    key, value = (part[:, prompt, :length].contiguous() for part in (key_KSPD, value_KSPD))
                    self.kernels.store_prompt_kv(key, value, shared.keys[layer], shared.values[layer])
                self._append([shared] * group_size, [self.free.pop() for _ in range(group_size)], 0)
            logits.append(self.head(hidden_SW))
        return torch.cat(logits)

    @abstractmethod
    def head(self, hidden_RW: Tensor) -> Tensor:
        """logits_RV from the output of the last norm."""

    @abstractmethod
    def step(self, tokens_R: Tensor) -> Tensor:
        """Feed one token to every row; returns logits_RV of the next token."""

    @abstractmethod
    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Feed one or more tokens to every row; returns logits_RV of the token after the last."""

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
        self._append([row.prompt], [slot], row.decoded)

    @torch.inference_mode()
    def keep(self, row: int) -> KeptRow:
        """A copy of a row."""
        slot, decoded = int(self.slots_R[row]), int(self.decoded_R[row])
        keys, values = (own[:, slot, :, : self._numbers(decoded)].clone() for own in (self.own_keys, self.own_values))
        return KeptRow(self.prompts[row], keys, values, decoded)

    @torch.inference_mode()
    def restore(self, row: KeptRow) -> None:
        """Append a kept row, also one from another decoder, to the batch."""
        slot = self.free.pop()
        self.make_room(row.decoded)
        for own, kept in ((self.own_keys, row.keys), (self.own_values, row.values)):
            own[:, slot, :, : kept.shape[-1]] = kept
        self._append([row.prompt], [slot], row.decoded)

    def make_room(self, tokens: int) -> bool:
        """Give every row room for at least so many own tokens; returns whether tensors were replaced."""
        if tokens <= self.capacity:
            return False
        written = self.own_keys.shape[-1]
        self.capacity = self._padded(max(tokens, 2 * self.capacity))
        for name in ("own_keys", "own_values"):
            old = getattr(self, name)
            new = in_huge_pages(old.new_empty(*old.shape[:-1], self._numbers(self.capacity)))
            new[..., :written] = old
            setattr(self, name, new)
        return True

    def _append(self, prompts: list[SharedPrompt], slots: list[int], decoded: int) -> None:
        """Append rows, each with `decoded` own keys and values in its slot, to the batch."""
        self.prompts += prompts
        self.slots_R = torch.cat([self.slots_R, torch.tensor(slots, dtype=torch.int32)])
        self.decoded_R = torch.cat([self.decoded_R, torch.full((len(slots),), decoded, dtype=torch.int32)])
        self._update_prompt_pointers()

    def _chunks(self, tokens: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Tokens that are fed at once, their rows, the own tokens before each, and where the last ones of rows are.

        Rows may have no token. The tokens are counted as decoded when all chunks have been fed.
        """
        counts_R = torch.tensor([len(of_row) for of_row in tokens])
        self.make_room(int((self.decoded_R + counts_R).max()))
        tokens_N = torch.tensor([token for of_row in tokens for token in of_row], dtype=torch.int64)
        rows_N = torch.arange(len(tokens)).repeat_interleave(counts_R)
        ends_R = counts_R.cumsum(0)
        offsets_N = torch.arange(len(tokens_N)) - (ends_R - counts_R)[rows_N]
        decoded_N = (self.decoded_R[rows_N] + offsets_N).int()
        for begin in range(0, len(tokens_N), self.chunk):
            part = slice(begin, begin + self.chunk)
            last = ends_R[(ends_R > begin) & (ends_R <= begin + self.chunk)] - 1 - begin
            yield tokens_N[part], rows_N[part], decoded_N[part], last
        self.decoded_R += counts_R.int()

    def _unpark(self, row: ParkedRow) -> bool:
        """True if another row has the slot of this parked row, which is none any more."""
        self.parked[row.slot] -= 1
        if self.parked[row.slot]:
            return True
        del self.parked[row.slot]
        return row.slot in self.slots_R.tolist()

    def _copy(self, slot: int, into: int, tokens: int) -> None:
        written = self._numbers(tokens)
        for own in (self.own_keys, self.own_values):
            own[:, into, :, :written] = own[:, slot, :, :written]

    def _padded(self, count: int) -> int:
        return -(-count // self.padding) * self.padding

    def _numbers(self, tokens: int) -> int:
        """Numbers of the keys of so many tokens of a head."""
        return self._padded(tokens) * self._padded(self.heads.width)

    def _update_prompt_pointers(self) -> None:
        """Update the pointers to every row's prompt, and its length, for the kernel."""
        self.keys_R = torch.tensor([shared.keys.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.values_R = torch.tensor([shared.values.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.lengths_R = torch.tensor([shared.length for shared in self.prompts], dtype=torch.int32)
