"""Normalisation and the gated MLP of training in one pass over memory each, forward and backward.

transformers writes an RMSNorm as seven operations, each of which reads and writes the whole tensor, and keeps for the
gradient what can be computed again from its input. The kernels give the same numbers from the input and one number a
row; so an update is faster and holds less.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from covey.llm.attention import PackedLayout
from covey.llm.native.attention import BlockAttention
from covey.llm.native.library import Kernels, kernels_for


def fuse(module: nn.Module) -> None:
    """Give every RMSNorm and gated MLP below `module` a forward that uses the kernels; weights and names stay.

    For models that `can_be_packed` knows. Where an input is of another type, or on another device, the module's own
    forward serves.
    """
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = MethodType(_norm_forward, part)  # type: ignore[method-assign]
        elif all(hasattr(part, name) for name in ("gate_proj", "up_proj", "down_proj")):
            part.forward = MethodType(_mlp_forward, part)  # type: ignore[method-assign]
        elif all(hasattr(part, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")):
            part.forward = MethodType(_attention_forward, part)  # type: ignore[method-assign]


def _norm_forward(norm: Any, x: Tensor) -> Tensor:
    kernels = kernels_for(x.dtype, x.device)
    if kernels is None or norm.weight.dtype != x.dtype:
        return type(norm).forward(norm, x)
    return _Norm.apply(x.contiguous(), norm.weight, norm.variance_epsilon, kernels)


def _mlp_forward(mlp: Any, x: Tensor) -> Tensor:
    kernels = kernels_for(x.dtype, x.device)
    if kernels is None or mlp.gate_proj.weight.dtype != x.dtype:
        return type(mlp).forward(mlp, x)
    return mlp.down_proj(_Gate.apply(mlp.gate_proj(x), mlp.up_proj(x), kernels))


def _attention_forward(
    attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    layout = kwargs.get("layout")
    kernels = kernels_for(hidden_states.dtype, hidden_states.device)
    if kernels is None or type(layout) is not PackedLayout or attention.q_proj.weight.dtype != hidden_states.dtype:
        return type(attention).forward(attention, hidden_states, position_embeddings, *args, **kwargs)
    x_NW = hidden_states[0]
    query, key, value = attention.q_proj(x_NW), attention.k_proj(x_NW), attention.v_proj(x_NW)
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query.unflatten(1, (-1, attention.head_dim))).flatten(1)
        key = attention.k_norm(key.unflatten(1, (-1, attention.head_dim))).flatten(1)
    cosine_ND, sine_ND = (part[0].contiguous() for part in position_embeddings)
    blocks = layout.blocks(query.shape[1] // attention.head_dim, key.shape[1] // attention.head_dim)
    out = BlockAttention.apply(query, key, value, cosine_ND, sine_ND, blocks, attention.scaling, kernels)
    return attention.o_proj(out)[None], None


class _Norm(torch.autograd.Function):
    """weight * x / rms(x) over the last dimension (arXiv 1910.07467, eq. 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
        out, scales = kernels.normalise(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scales)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight, scales = ctx.saved_tensors
        dx, dweight = ctx.kernels.normalise_backward(x, weight, scales, d.contiguous())
        return dx, dweight.to(weight.dtype), None, None


class _Gate(torch.autograd.Function):
    """silu(gate) * up (arXiv 2002.05202, eq. 6)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        out = torch.empty_like(gate)
        kernels.gate(gate.flatten(0, -2), up.flatten(0, -2), out.flatten(0, -2))
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        dgate, dup = ctx.kernels.gate_backward(gate, up, d.contiguous())
        return dgate, dup, None
