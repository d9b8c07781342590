"""The kernels for GPUs without Triton's interpreter, which takes a hundred times as long: for tests of what calls them.

`triton_kernels.check` compares the attention of Triton with torch's as it is here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from covey.llm.native.bindings import kernels_for
from covey.llm.native.triton_kernels import DecodedRows, TritonKernels


class PlainKernels:
    """The kernels for CPUs in fp32, with attention of a decoding step by torch, of the same arguments as Triton's."""

    instruction_set = "Triton"
    store_prompt_kv = TritonKernels.store_prompt_kv

    def __init__(self) -> None:
        self.of_cpu = kernels_for(torch.float32, torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_cpu, name)

    def decode_attention(self, rows: DecodedRows, layer: int, qkv_RX: Tensor, norms: Sequence[Tensor | None]) -> Tensor:
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
            out[row] = torch.nn.functional.scaled_dot_product_attention(
                query[row][:, None], keys, values, scale=rows.scaling, enable_gqa=True
            )[:, 0]
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
