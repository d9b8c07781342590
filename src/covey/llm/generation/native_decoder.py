"""Decoder of Llama-like models on a CPU with covey's kernels.

A row has a slot in the KV cache of completions and a pointer to the KV cache of its prompt. Rows may be at different
positions. A row can be removed without copies, and its slot is free for a new row, so a long completion does not block
the rest of the batch. A parked row has its slot, but takes no part in steps until it is brought back. Because tokens
are only appended, it may share the slot with rows that go on.

All layers and the output layer have weights prepacked for products with few rows. `PackedStack` uses oneDNN's matrix
products and covey's kernels between them, on every processor. `TiledStack` makes one call for the whole step, on
processors with AVX512-BF16 or AMX. Both compute the same up to rounding.

Shapes: S prompts, P prompt tokens, R rows, N tokens of all rows, W hidden width, H heads, K key-value heads,
D head width, V vocabulary; of a linear layer: M outputs, N inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.llm.generation.decoder import PackedLinear, copies_fit, joined, packed_layers, prefill
from covey.llm.model.architecture import Heads, LayerModules
from covey.llm.native.bindings import PAD, AttentionArgs, DecodeStepArgs, Kernels, Layer, Linear, address_of, padded
from covey.runtime.device import in_huge_pages


class Stack(Protocol):
    """The layers and the output layer, for one new token per row; rows may be at different positions."""

    def step(self, hidden_RW: Tensor, args: AttentionArgs, own_keys: Tensor, own_values: Tensor) -> Tensor:
        """One decoding step.

        Args:
            hidden_RW: embeddings of the tokens, fp32; overwritten.
            args: every kernel argument except the pointers of this step and of its layers.
            own_keys, own_values: KV cache of the completions, [layers, ...].

        Returns:
            logits_RV of the next tokens.
        """

    def head(self, hidden_RW: Tensor) -> Tensor:
        """logits_RV from the output of the last norm."""


def make_stack(module: PreTrainedModel, kernels: Kernels, rows: int, least_rows: int = 1) -> Stack:
    """The fastest layers for this processor, for at most `rows` rows.

    If the number of rows changes their bits, fewer than `least_rows` are padded.
    """
    if kernels.has_avx512_bf16 and copies_fit(module):
        return TiledStack(module, kernels, rows)
    return PackedStack(module, kernels, least_rows)


class PackedStack:
    """Layers with oneDNN's matrix products and covey's kernels; implements `Stack`."""

    def __init__(self, module: PreTrainedModel, kernels: Kernels, least_rows: int = 1) -> None:
        base = cast(Any, module.base_model)
        self.kernels, self.least_rows = kernels, least_rows
        self.layers = packed_layers(module)
        self.norm = base.norm.weight.detach()
        self.linear_head = PackedLinear(module.get_output_embeddings())  # type: ignore[arg-type]

    def step(self, hidden_RW: Tensor, args: AttentionArgs, own_keys: Tensor, own_values: Tensor) -> Tensor:
        kernels, epsilon = self.kernels, args.epsilon
        hidden_RW = self._padded(hidden_RW)
        normed_RW = torch.empty_like(hidden_RW, dtype=kernels.dtype)
        attended = normed_RW.new_zeros(len(hidden_RW), args.heads * args.head_dim)
        args.out, args.out_row_stride = attended.data_ptr(), attended.shape[1]
        added_RW: Tensor | None = None
        for number, layer in enumerate(self.layers):
            parts = layer.modules
            kernels.add_rmsnorm(hidden_RW, added_RW, parts.input_norm, epsilon, hidden_RW, normed_RW)
            qkv = layer.qkv(normed_RW)
            args.layer, args.qkv, args.qkv_row_stride = number, qkv.data_ptr(), qkv.shape[1]
            args.query_norm, args.key_norm = address_of(parts.query_norm), address_of(parts.key_norm)
            args.own_keys, args.own_values = own_keys[number].data_ptr(), own_values[number].data_ptr()
            kernels.decode_attention(args)
            attended_RW = layer.output(attended)
            kernels.add_rmsnorm(hidden_RW, attended_RW, parts.inner_norm, epsilon, hidden_RW, normed_RW)
            gate, up = layer.gate_up(normed_RW).chunk(2, dim=1)
            gated = gate.new_empty(gate.shape)
            kernels.swiglu(gate, up, gated)
            added_RW = layer.down(gated)
        kernels.add_rmsnorm(hidden_RW, added_RW, self.norm, epsilon, hidden_RW, normed_RW)
        return self.linear_head(normed_RW)[: args.rows]

    def head(self, hidden_RW: Tensor) -> Tensor:
        return self.linear_head(self._padded(hidden_RW))[: len(hidden_RW)]

    def _padded(self, hidden_RW: Tensor) -> Tensor:
        return nn.functional.pad(hidden_RW, (0, 0, 0, max(self.least_rows - len(hidden_RW), 0)))


class TiledStack:
    """All layers in one kernel call, with prepacked weights; implements `Stack`."""

    def __init__(self, module: PreTrainedModel, kernels: Kernels, rows: int) -> None:
        base = cast(Any, module.base_model)
        self.kernels = kernels
        self.referenced: list[Tensor] = []  # tensors whose addresses the kernels use; keeps them in memory
        self.layers = (Layer * len(base.layers))(*(self._layer(LayerModules.of(layer)) for layer in base.layers))
        self.linear_head = self._linear(*joined(module.get_output_embeddings()))  # type: ignore[arg-type]
        first = self.layers[0]
        sizes = [first.qkv.inputs, first.qkv.outputs, first.output.inputs, first.down.inputs]
        self.buffers = [torch.zeros(-(-rows // 16) * 16, padded(size), dtype=kernels.dtype) for size in sizes]
        self.norm = base.norm.weight.detach()

    def step(self, hidden_RW: Tensor, args: AttentionArgs, own_keys: Tensor, own_values: Tensor) -> Tensor:
        logits_RV = hidden_RW.new_empty(len(hidden_RW), self.linear_head.outputs, dtype=self.kernels.dtype)
        normed, qkv, attended, gated = self.buffers
        args.qkv, args.qkv_row_stride = qkv.data_ptr(), qkv.shape[1]
        args.out, args.out_row_stride = attended.data_ptr(), attended.shape[1]
        args.own_keys, args.own_values = own_keys.data_ptr(), own_values.data_ptr()
        self.kernels.decode_step(
            DecodeStepArgs(
                layers=self.layers, layer_count=len(self.layers), norm=self.norm.data_ptr(), head=self.linear_head,
                attention=args, own_layer_stride=own_keys.stride(0), hidden=hidden_RW.data_ptr(),
                normed=normed.data_ptr(), qkv=qkv.data_ptr(), attended=attended.data_ptr(), gated=gated.data_ptr(),
                logits=logits_RV.data_ptr(),
            )
        )  # fmt: skip
        return logits_RV

    def head(self, hidden_RW: Tensor) -> Tensor:
        rows, width = hidden_RW.shape
        padding = (0, padded(width) - width, 0, padded(rows) - rows)
        return self.kernels.linear(nn.functional.pad(hidden_RW, padding), self.linear_head)[:rows]

    def _layer(self, parts: LayerModules) -> Layer:
        norms = {name: getattr(parts, name) for name in ("input_norm", "query_norm", "key_norm", "inner_norm")}
        self.referenced += [norm for norm in norms.values() if norm is not None]
        weight, bias = joined(*parts.gate_up)
        return Layer(
            **{name: address_of(norm) for name, norm in norms.items()},
            qkv=self._linear(*joined(*parts.qkv)),
            output=self._linear(*joined(parts.output)),
            gate_up=self._linear(_interleave(weight), None if bias is None else _interleave(bias)),
            down=self._linear(*joined(parts.down)),
        )

    def _linear(self, weight_MN: Tensor, bias_M: Tensor | None) -> Linear:
        outputs, inputs = weight_MN.shape
        tiles = self.kernels.prepack_weight(weight_MN.contiguous())
        self.referenced.append(tiles)
        if bias_M is not None:
            bias_M = nn.functional.pad(bias_M, (0, padded(outputs) - outputs))
            self.referenced.append(bias_M)
        return Linear(weight=tiles.data_ptr(), bias=address_of(bias_M), outputs=outputs, inputs=inputs)


def _interleave(joined_halves: Tensor) -> Tensor:
    """Interleave the two halves of the first dimension in blocks of PAD / 2; both are padded with zeros."""
    parts = joined_halves.unflatten(0, (2, -1))
    missing = -parts.shape[1] % (PAD // 2)
    parts = nn.functional.pad(parts, (*(0, 0) * (parts.dim() - 2), 0, missing))
    return parts.unflatten(1, (-1, PAD // 2)).transpose(0, 1).flatten(0, 2)


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
    block = 1

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
