"""The decoder of Llama-like models on a CPU: packed matrix products, and everything between them in kernels.cpp.

A row is a slot in the caches of the rows' own keys and values, and the address of its prompt's. So rows may stand at
different places of their completions, may leave at any time without anything being moved, and others may take their
slots: a long straggler never keeps the machine from its work.

Shapes: S prompts, P prompt tokens, R rows, W hidden width, H heads, K key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.decoding import prefill
from covey.llm.native.library import PAD, AttentionPlace, Kernels, padded
from covey.llm.native.weights import pack
from covey.llm.packed import PackedLinear


@dataclass(frozen=True)
class _SharedPrompt:
    """Keys and values of a prompt, as the kernel reads them."""

    keys: Tensor  # [layers, K, padded P / PAD, D, PAD]
    values: Tensor  # [layers, K, P, padded D]
    length: int


class NativeDecoder:
    """Rows that share their prompts' keys and values, each at its own place."""

    patience = 0.0  # a departure costs nothing

    def __init__(self, module: PreTrainedModel, kernels: Kernels, rows: int, max_new_tokens: int) -> None:
        self.module = module
        self.base = cast(Any, module.base_model)  # with `embed_tokens`, `rotary_emb`, `layers` and `norm`
        self.kernels = kernels
        self.layers = [pack(layer) for layer in self.base.layers]
        self.head = PackedLinear(module.get_output_embeddings())  # type: ignore[arg-type]
        config = module.config.get_text_config()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.epsilon = config.rms_norm_eps
        self.capacity = padded(max_new_tokens)
        layers, kind = len(self.layers), kernels.dtype
        self.own_keys = torch.empty(layers, rows, self.kv_heads, self.capacity * self.width, dtype=kind)
        self.own_values = torch.empty(layers, rows, self.kv_heads, self.capacity, padded(self.width), dtype=kind)
        self.free = list(range(rows))[::-1]
        self.prompts: list[_SharedPrompt] = []  # of every row
        self.slots_R = torch.empty(0, dtype=torch.int32)
        self.decoded_R = torch.empty(0, dtype=torch.int32)
        self._read_prompts()

    def room(self) -> int:
        return len(self.free)

    @torch.inference_mode()
    def add(self, prompts: list[list[int]], group_size: int) -> Tensor:
        hidden_SW, layout = prefill(self.module, prompts)
        for place, length in enumerate(layout.prompt_lengths):
            keys = torch.stack([key_SKPD[place, :, :length].transpose(1, 2) for key_SKPD in layout.keys])
            values = torch.stack([value_SKPD[place, :, :length] for value_SKPD in layout.values])
            blocks = _in_pieces(keys).transpose(2, 3).contiguous()
            shared = _SharedPrompt(blocks, _in_pieces(values).contiguous(), length)
            self.prompts += [shared] * group_size
        slots = [self.free.pop() for _ in range(len(prompts) * group_size)]
        self.slots_R = torch.cat([self.slots_R, torch.tensor(slots, dtype=torch.int32)])
        self.decoded_R = torch.cat([self.decoded_R, torch.zeros(len(slots), dtype=torch.int32)])
        self._read_prompts()
        return self.head(hidden_SW)

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        staying = rows.tolist()
        slots = self.slots_R.tolist()
        self.free += sorted(set(slots) - {slots[row] for row in staying}, reverse=True)
        self.prompts = [self.prompts[row] for row in staying]
        self.slots_R, self.decoded_R = self.slots_R[rows], self.decoded_R[rows]
        self._read_prompts()

    @torch.inference_mode()
    def step(self, tokens_R: Tensor) -> Tensor:
        base, kernels = self.base, self.kernels
        hidden_RW = base.embed_tokens(tokens_R).float()
        angles = base.rotary_emb(hidden_RW, (self.lengths_R + self.decoded_R)[None].long())
        cosine, sine = (part.to(kernels.dtype).contiguous() for part in angles)
        normed_RW = torch.empty_like(hidden_RW, dtype=kernels.dtype)
        attended = normed_RW.new_empty(len(tokens_R), self.heads * self.width)
        place = self._place(cosine, sine, attended)
        added_RW: Tensor | None = None
        for number, layer in enumerate(self.layers):
            kernels.add_and_normalise(hidden_RW, added_RW, layer.input_norm, self.epsilon, hidden_RW, normed_RW)
            qkv = layer.qkv(normed_RW)
            place.layer, place.qkv = number, qkv.data_ptr()
            place.query_norm = None if layer.query_norm is None else layer.query_norm.data_ptr()
            place.key_norm = None if layer.key_norm is None else layer.key_norm.data_ptr()
            place.own_keys, place.own_values = self.own_keys[number].data_ptr(), self.own_values[number].data_ptr()
            kernels.attend(place)
            attended_RW = layer.output(attended)
            kernels.add_and_normalise(hidden_RW, attended_RW, layer.inner_norm, self.epsilon, hidden_RW, normed_RW)
            gate_up = layer.gate_up(normed_RW)
            gate, up = gate_up.chunk(2, dim=1)
            gated = gate.new_empty(gate.shape)
            kernels.gate(gate, up, gated)
            added_RW = layer.down(gated)
        kernels.add_and_normalise(hidden_RW, added_RW, base.norm.weight, self.epsilon, hidden_RW, normed_RW)
        self.decoded_R += 1
        return self.head(normed_RW)

    def _read_prompts(self) -> None:
        """Where the kernel finds the prompt of every row."""
        self.keys_R = torch.tensor([shared.keys.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.values_R = torch.tensor([shared.values.data_ptr() for shared in self.prompts], dtype=torch.int64)
        self.lengths_R = torch.tensor([shared.length for shared in self.prompts], dtype=torch.int32)

    def _place(self, cosine: Tensor, sine: Tensor, out: Tensor) -> AttentionPlace:
        """What stays the same for all layers of a step."""
        return AttentionPlace(
            cosine=cosine.data_ptr(), sine=sine.data_ptr(), out=out.data_ptr(),
            prompt_keys=self.keys_R.data_ptr(), prompt_values=self.values_R.data_ptr(),
            prompt_lengths=self.lengths_R.data_ptr(), slots=self.slots_R.data_ptr(), decoded=self.decoded_R.data_ptr(),
            rows=len(out), heads=self.heads, kv_heads=self.kv_heads, width=self.width, capacity=self.capacity,
            threads=torch.get_num_threads(), scaling=self.width**-0.5, epsilon=self.epsilon,
        )  # fmt: skip


def _in_pieces(tensor: Tensor) -> Tensor:
    """[..., N] -> [..., pieces, PAD], the halves of a piece alternating where the kernels want them so."""
    pieces = torch.nn.functional.pad(tensor, (0, padded(tensor.shape[-1]) - tensor.shape[-1])).unflatten(-1, (-1, PAD))
    if tensor.dtype == torch.bfloat16:
        pieces = pieces.unflatten(-1, (2, PAD // 2)).transpose(-1, -2).flatten(-2)
    return pieces
