"""Fused layers of a Llama-like decoder for training: RMSNorm, SwiGLU and attention with one pass over memory each, in
the forward and in the backward pass.

transformers computes an RMSNorm by seven operations, each of which reads and writes the whole tensor, and stores
intermediate results for the backward pass. The kernels compute the same from the input and one number per row, which is
faster and needs less memory.

The residual stream is in fp32. In bf16 every layer would round it to 8 bits: a gradient of SmolLM2-135M then has a
cosine of 0.9987 with the exact gradient, with the residual stream in fp32 0.9993 (both with torch's attention).
"""

from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from covey.llm.model.architecture import (
    FAMILIES,
    AttentionRule,
    Family,
    Heads,
    gate_up_of,
    is_gelu,
    norm_epsilon,
    norm_scale,
    qkv_of,
    residual_scale,
)
from covey.llm.model.lora import NF4Linear, base_of, factors_of, stored
from covey.llm.model.prefix_attention import PackedLayout
from covey.llm.native.bindings import Kernels, KernelSet


def fuse(module: PreTrainedModel, kernels: KernelSet) -> None:
    """Replace the `forward` of the layers of `module` by functions that use the kernels. Weights and names stay. Layers
    whose `forward` was replaced already keep theirs.

    Only for models without an `obstacle` for the kernels. The modules' own `forward` runs if no kernels support the
    dtype or device of an input.
    """
    family = FAMILIES[module.config.get_text_config().model_type]
    for part in module.modules():
        if "forward" not in vars(part) and (forward := _forward_of(part)):
            forward = partial(forward, kernels=kernels, family=family)
            part.forward = MethodType(forward, part)  # type: ignore[method-assign]


def _forward_of(part: nn.Module) -> Any:
    if type(part).__name__.endswith("RMSNorm"):
        return _norm_forward
    for names, forward in (
        (("down_proj",), _mlp_forward),
        (("o_proj",), _attention_forward),
        (("self_attn", "mlp"), _layer_forward),
    ):
        if all(hasattr(part, name) for name in names):
            return forward
    return None


class PendingResidual(NamedTuple):
    """The residual stream and the output of the last layer, which the next norm adds to it in the same pass."""

    total: Tensor
    added: Tensor


def _layer_forward(
    layer: Any, hidden_states: Tensor | PendingResidual, *, kernels: KernelSet, family: Family, **kwargs: Any
) -> Tensor | PendingResidual:
    total, added = hidden_states if isinstance(hidden_states, PendingResidual) else (hidden_states, None)
    weight = layer.post_attention_layernorm.weight
    native = kernels.of(weight)
    if native is None or total.dtype not in (weight.dtype, torch.float32):
        own: Tensor = type(layer).forward(layer, hidden_states, **kwargs)
        return own

    def added_by(x: Tensor, norm: str | None) -> Tensor:
        x = x if norm is None else getattr(layer, norm)(x)
        return x if (scale := residual_scale(layer)) == 1.0 else x * scale

    total, normed = _add_and_normalise(total, added, layer, family.before_attention, family, native)
    attended, _ = layer.self_attn(hidden_states=normed, **kwargs)
    added = added_by(attended, family.after_attention)
    total, normed = _add_and_normalise(total, added, layer, family.before_mlp, family, native)
    added = added_by(layer.mlp(normed), family.after_mlp)
    if "layout" in kwargs:
        return PendingResidual(total, added)
    return total + added  # other callers of the model may read the hidden states between the layers


def _norm_forward(norm: Any, x: Tensor | PendingResidual, *, kernels: KernelSet, family: Family) -> Tensor:
    total, added = x if isinstance(x, PendingResidual) else (x, None)
    native = kernels.of(norm.weight) if total.dtype in (norm.weight.dtype, torch.float32) else None
    if native is None:
        return type(norm).forward(norm, x)
    scale_W, epsilon = norm_scale(norm, family.offset), norm_epsilon(norm)
    if added is None and total.dtype == native.dtype:
        return _Norm.apply(total.contiguous(), scale_W, epsilon, native)
    return _AddNorm.apply(total.float().contiguous(), _contiguous(added), scale_W, epsilon, native)[1]


def _add_and_normalise(
    total: Tensor, added: Tensor | None, layer: Any, name: str | None, family: Family, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """total + added in fp32, and its RMSNorm in the dtype of the weights; without a norm, what is rounded to it."""
    if name is None:
        total = total.float() if added is None else total.float() + added
        return total, total.to(kernels.dtype)
    norm = getattr(layer, name)
    scale_W = norm_scale(norm, family.offset)
    return _AddNorm.apply(total.float().contiguous(), _contiguous(added), scale_W, norm_epsilon(norm), kernels)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _mlp_forward(mlp: Any, x: Tensor, *, kernels: KernelSet, family: Family) -> Tensor:
    native, layers = kernels.of(x), gate_up_of(mlp)
    if native is None or stored(base_of(layers[0])).dtype != x.dtype:
        return type(mlp).forward(mlp, x)
    gate, up = _parts(_products(x.flatten(0, -2), native, *layers), 2)
    (out,) = _products(_Gate.apply(gate, up, native, is_gelu(mlp.config)), native, mlp.down_proj)
    return out.view_as(x)


def _parts(products: tuple[Tensor, ...], *sizes: int) -> tuple[Tensor, ...]:
    """The results of one linear layer for each, or the parts of a joined one; one size: the number of equal parts."""
    if len(products) > 1:
        return products
    parts = products[0].chunk(sizes[0], dim=1) if len(sizes) == 1 else products[0].split(sizes, dim=1)
    return tuple(part.contiguous() for part in parts)


def _attention_forward(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *,
    kernels: KernelSet,
    family: Family,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    angles = tuple(part.to(hidden_states.dtype) for part in position_embeddings)
    layout, layers = kwargs.get("layout"), qkv_of(attention)
    native = kernels.of(hidden_states)
    if (
        native is None
        or not isinstance(layout, PackedLayout)
        or stored(base_of(layers[0])).dtype != hidden_states.dtype
    ):
        return type(attention).forward(attention, hidden_states, angles, **kwargs)
    x_NW, rule, width = hidden_states[0], AttentionRule.of(attention), attention.head_dim
    heads = attention.config.num_attention_heads, *[attention.config.num_key_value_heads] * 2
    query, key, value = _parts(_products(x_NW, native, *layers), *(count * width for count in heads))
    if hasattr(attention, "q_norm"):
        query, key = (_normed(x, norm) for x, norm in ((query, attention.q_norm), (key, attention.k_norm)))
    if not rule.rotates:
        angles = torch.ones_like(angles[0]), torch.zeros_like(angles[1])
    angles_ND = cosine_ND, sine_ND = tuple(part[0].contiguous() for part in angles)
    if layout.stores_prompts:
        key_KND, value_KND = (part.unflatten(1, (-1, width)).transpose(0, 1) for part in (key, value))
        exact_KND = key_KND.float()
        rotated_KND = (exact_KND * cosine_ND + rotate_half(exact_KND) * sine_ND).to(key.dtype)
        layout.store_prompt_kv(attention.layer_idx, *(layout.pad_prompts(part) for part in (rotated_KND, value_KND)))
    out = Attention.apply(query, key, value, angles_ND, layout.sequences, rule, native)
    return _products(out, native, attention.o_proj)[0][None], None


def _normed(x_NX: Tensor, norm: Any) -> Tensor:
    """The norm of every head, or of all together if its weight is so wide."""
    return norm(x_NX.unflatten(1, (-1, len(norm.weight)))).flatten(1)


def _products(x_NW: Tensor, kernels: Kernels, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Outputs of several linear layers with the same input, with the adapters that they use."""
    factors = [factors_of(layer) for layer in layers]
    bases = [base_of(layer) for layer in layers]
    quantized = [base if isinstance(base, NF4Linear) else None for base in bases]
    if any(one is not None for one in (*factors, *quantized)):
        scalings = [0.0 if one is None else one.scaling for one in factors]
        of_layers = [
            (None if four_bit else base.weight, base.bias, *((None, None) if one is None else one[:2]))
            for base, four_bit, one in zip(bases, quantized, factors, strict=True)
        ]
        tensors = (tensor for four in of_layers for tensor in four)
        return _AdaptedProducts.apply(x_NW.contiguous(), scalings, quantized, *tensors)
    if any(base.bias is not None for base in bases):
        return tuple(base(x_NW) for base in bases)
    return _Products.apply(x_NW.contiguous(), kernels, *(base.weight for base in bases))


class _Products(torch.autograd.Function):
    """x W' for several weights, whose gradients are computed together. Frozen weights need no x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None, *weights)
        ctx.kernels = kernels
        return tuple(x @ weight.T for weight in weights)

    @staticmethod
    def backward(ctx: Any, *ds: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        ds = tuple(d.contiguous() for d in ds)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ds[0] @ weights[0]
            for d, weight in zip(ds[1:], weights[1:], strict=True):
                dx.addmm_(d, weight)
        wanted = [i for i in range(len(ds)) if ctx.needs_input_grad[2 + i]]
        made = {i: torch.empty_like(weights[i]) for i in wanted}
        if wanted:
            ctx.kernels.weight_gradients(x, [ds[i] for i in wanted], list(made.values()))
        return dx, None, *(made.get(i) for i in range(len(ds)))


class _AdaptedProducts(torch.autograd.Function):
    """x W' + b + s (x A') B' for several frozen layers with low-rank adapters; gradients of x, A and B.

    After x and every s come W, b, A and B of each layer; b is None without a bias, A and B without an adapter. W is
    None if it is that of a quantized layer, which computes it in each pass. Without adapters x is not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scalings: list[float], quantized: list[NF4Linear | None], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        outs, products = [], []
        for number, scaling in enumerate(scalings):
            frozen_MN, bias, a_RN, b_MR = tensors[4 * number : 4 * number + 4]
            out, product = nn.functional.linear(x, _whole(frozen_MN, quantized[number]), bias), None
            if a_RN is not None and b_MR is not None:
                product = x @ a_RN.T
                out.addmm_(product, b_MR.T, alpha=scaling)
            outs.append(out)
            products.append(product)
        ctx.save_for_backward(x if any(scalings) else None, *tensors, *products)
        ctx.scalings, ctx.quantized = scalings, quantized
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *ds: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *saved = ctx.saved_tensors
        dx: Tensor | None = None
        gradients: list[Tensor | None] = []
        for number, (d, scaling) in enumerate(zip(ds, ctx.scalings, strict=True)):
            frozen_MN, _, a_RN, b_MR = saved[4 * number : 4 * number + 4]
            d, weight_MN = d.contiguous(), _whole(frozen_MN, ctx.quantized[number])
            dx = d.new_zeros(len(d), weight_MN.shape[1]) if dx is None else dx
            dx.addmm_(d, weight_MN)
            da_RN = db_MR = None
            if a_RN is not None:
                product = saved[4 * len(ds) + number]
                dproduct = (d @ b_MR).mul_(scaling)
                dx.addmm_(dproduct, a_RN)
                da_RN, db_MR = dproduct.T @ x, (d.T @ product).mul_(scaling)
            gradients += [None, None, da_RN, db_MR]
        return dx, None, None, *gradients


def _whole(frozen_MN: Tensor | None, quantized: NF4Linear | None) -> Tensor:
    if quantized is not None:
        return quantized.weight
    assert frozen_MN is not None
    return frozen_MN


class Attention(torch.autograd.Function):
    """Causal attention over a prefix tree with rotary embeddings (arXiv 2104.09864): softmax(q k' scaling) v, by
    the rule of the layer.

    q_NX, k_NY, v_NY and the result have the heads of a token side by side, as the linear layers return them. The
    backward pass needs these and one logsumexp per query and head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NX: Tensor,
        k_NY: Tensor,
        v_NY: Tensor,
        angles_ND: tuple[Tensor, Tensor],
        sequences_S3: Tensor,
        rule: AttentionRule,
        kernels: Kernels,
    ) -> Tensor:
        tokens, width = angles_ND[0].shape
        out = torch.empty_like(q_NX)
        logsumexp = q_NX.new_empty(tokens, q_NX.shape[1] // width, dtype=torch.float32)
        ctx.save_for_backward(q_NX, k_NY, v_NY, out, logsumexp)
        ctx.attend = partial(
            kernels.prefix_attention, sequences_S3, width, rule, cosine=angles_ND[0], sine=angles_ND[1]
        )
        ctx.attend(query=q_NX, key=k_NY, value=v_NY, out=out, logsumexp=logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, d_NX: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_NX, k_NY, v_NY, out, logsumexp = ctx.saved_tensors
        gradients = tuple(torch.empty_like(part) for part in (q_NX, k_NY, v_NY))
        wanted = dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))
        ctx.attend(query=q_NX, key=k_NY, value=v_NY, out=out, logsumexp=logsumexp, dout=d_NX.contiguous(), **wanted)
        return *gradients, None, None, None, None


class _AddNorm(torch.autograd.Function):
    """total = hidden + added, in fp32, and its RMSNorm weight * total / rms(total). `added` may be None."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        total = hidden.view_as(hidden) if added is None else torch.empty_like(hidden)
        out, scales = torch.empty_like(hidden, dtype=kernels.dtype), hidden.new_empty(hidden.shape[:-1])
        kernels.add_rmsnorm(hidden, added, weight, epsilon, total, out, scales)
        ctx.save_for_backward(total, weight, scales)
        ctx.kernels, ctx.adds = kernels, added is not None
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, past: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total, weight, scales = ctx.saved_tensors
        if d is None:
            d = torch.zeros_like(total, dtype=ctx.kernels.dtype)
        past = None if past is None else past.contiguous()
        dtotal, dadded, dweight = ctx.kernels.add_rmsnorm_backward(
            total, weight, scales, d.contiguous(), past, ctx.adds
        )
        return dtotal, dadded, dweight.to(weight.dtype), None, None


class _Norm(torch.autograd.Function):
    """RMSNorm (arXiv 1910.07467, eq. 4): weight * x / rms(x) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
        out, scales = kernels.rmsnorm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scales)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight, scales = ctx.saved_tensors
        dx, dweight = ctx.kernels.rmsnorm_backward(x, weight, scales, d.contiguous())
        return dx, dweight.to(weight.dtype), None, None


class _Gate(torch.autograd.Function):
    """SwiGLU (arXiv 2002.05202, eq. 6): silu(gate) * up; or GEGLU, with GELU's approximation by tanh."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Any, is_gelu: bool) -> Tensor:
        out = torch.empty_like(gate)
        compute = kernels.geglu if is_gelu else kernels.swiglu
        compute(gate.flatten(0, -2), up.flatten(0, -2), out.flatten(0, -2))
        ctx.save_for_backward(gate, up)
        ctx.kernels, ctx.is_gelu = kernels, is_gelu
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        compute = ctx.kernels.geglu_backward if ctx.is_gelu else ctx.kernels.swiglu_backward
        dgate, dup = compute(gate, up, d.contiguous())
        return dgate, dup, None, None


def kept_bytes(
    heads: Heads, hidden: int, intermediate: int, itemsize: int, *, has_head_norms: bool, has_output_norms: bool
) -> int:
    """Bytes that autograd keeps of one token in one layer.

    Args:
        heads: H, K and D.
        hidden, intermediate: widths of the residual stream and of the MLP.
        itemsize: bytes of an activation and of a weight.
        has_head_norms: whether queries and keys are normalised, as in Qwen3.
        has_output_norms: whether what a layer adds is normalised, as in Gemma 3.
    """
    norms = 2 * (residual_norm_bytes(hidden) + hidden * itemsize)  # and the result of each, for the next products
    norms += 2 * (hidden * itemsize + 4) if has_output_norms else 0
    query, key_value = heads.queries * heads.width, heads.keys * heads.width
    attention = 2 * (query + key_value) * itemsize + 4 * heads.queries  # q, k, v, out and logsumexp
    head_norms = (query + key_value) * itemsize + 4 * (heads.queries + heads.keys)  # inputs and 1 / rms
    mlp = 3 * intermediate * itemsize  # gate, up and their product
    return norms + attention + mlp + (head_norms if has_head_norms else 0)


def residual_norm_bytes(hidden: int) -> int:
    """Bytes that `_AddNorm` keeps of one token: the residual stream and 1 / rms, in fp32."""
    return hidden * 4 + 4
