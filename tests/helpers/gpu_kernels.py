"""The kernels for GPUs without Triton's interpreter, which takes a hundred times as long: for tests of what calls them.

`triton_kernels.check` compares the attention of Triton with torch's as it is here.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from covey.llm.model.architecture import AttentionRule
from covey.llm.model.prefix_attention import PackedLayout
from covey.llm.native.bindings import kernels_for
from covey.llm.native.triton_kernels import DecodedRows, TritonKernels


class PlainKernels:
    """The kernels for CPUs in fp32, with attention of a decoding step by torch, of the same arguments as Triton's."""

    instruction_set = "Triton"
    features = TritonKernels.features
    store_prompt_kv = TritonKernels.store_prompt_kv

    def __init__(self) -> None:
        self.of_cpu = kernels_for(torch.float32, torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_cpu, name)

    def geglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)

    @torch.enable_grad()
    def geglu_backward(self, gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (gate, up)]
        return torch.autograd.grad(torch.nn.functional.gelu(inputs[0], approximate="tanh") * inputs[1], inputs, dout)

    @torch.enable_grad()
    def prefix_attention(self, sequences_S3: Tensor, width: int, rule: AttentionRule, **tensors: Tensor) -> None:
        if not rule.window:
            self.of_cpu.prefix_attention(sequences_S3, width, rule, **tensors)
            return
        rows, layout = sequences_S3.tolist(), PackedLayout([[0] * len(tensors["query"])])
        layout.sequences, before = sequences_S3, [0] * len(rows)
        for number, (first, length, parent) in enumerate(rows):
            before[number] = before[parent] + rows[parent][1] if parent >= 0 else 0
            layout.positions[first : first + length] = before[number] + torch.arange(length)
        inputs = [tensors[name].detach().requires_grad_() for name in ("query", "key", "value")]
        query, key, value = (x.unflatten(1, (-1, width)).transpose(0, 1) for x in inputs)
        query, key = (x * tensors["cosine"] + rotate_half(x) * tensors["sine"] for x in (query, key))
        out = layout.attend_by_scores(0, query, key, value, rule.scaling, rule.window).flatten(1)
        tensors["out"].copy_(out.detach())
        if "dout" in tensors:
            gradients = torch.autograd.grad(out, inputs, tensors["dout"])
            for name, gradient in zip(("dquery", "dkey", "dvalue"), gradients, strict=True):
                tensors[name].copy_(gradient)

    def decode_attention(
        self, rows: DecodedRows, layer: int, rule: AttentionRule, qkv_RX: Tensor, norms: Sequence[Tensor | None]
    ) -> Tensor:
        heads, kv_heads, width = rows.shape
        query, key, value = qkv_RX.unflatten(1, (-1, width)).split([heads, kv_heads, kv_heads], dim=1)
        query, key = (self._rotated(x, norm, rows) for x, norm in zip((query, key), norms, strict=True))
        own = [cache[layer].unflatten(2, (rows.capacity, width)) for cache in (rows.own_keys, rows.own_values)]
        slots, decoded = rows.slots.tolist(), rows.decoded.tolist()
        for row, (slot, place) in enumerate(zip(slots, decoded, strict=True)):
            own[0][slot, :, place], own[1][slot, :, place] = key[row], value[row]
        seen = {row for tile in rows.tiles.tolist() for row in tile}
        out = torch.zeros_like(query)
        for row, (slot, place) in enumerate(zip(slots, decoded, strict=True)):
            length = int(rows.prompt_lengths[row]) if row in seen else 0
            shape = kv_heads, length, width
            prompts = [numbers_at(int(at[row]), layer, shape) for at in (rows.prompt_keys, rows.prompt_values)]
            keys, values = (
                torch.cat([prompt, one[slot, :, : place + 1]], 1) for prompt, one in zip(prompts, own, strict=True)
            )
            keys, values = (
                x[:, -(rule.window or x.shape[1]) :].repeat_interleave(heads // kv_heads, 0) for x in (keys, values)
            )
            scores = query[row][:, None] @ keys.transpose(1, 2) * rule.scaling
            out[row] = (scores.softmax(2) @ values)[:, 0]
        return out.flatten(1)

    def _rotated(self, x: Tensor, norm: Tensor | None, rows: DecodedRows) -> Tensor:
        if norm is not None:
            x = self.of_cpu.rmsnorm(x.contiguous(), norm, rows.epsilon)[0]
        return x * rows.cosine[:, None] + rotate_half(x) * rows.sine[:, None]


def numbers_at(address: int, layer: int, shape: tuple[int, int, int]) -> Tensor:
    """Those of a layer in the keys or values of a prompt at an address."""
    count = int(np.prod(shape))
    if not count:
        return torch.zeros(shape)
    found = (ctypes.c_float * count).from_address(address + 4 * layer * count)
    return torch.from_numpy(np.array(found)).view(shape)
