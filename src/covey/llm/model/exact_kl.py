"""Exact KL between two policies over the vocabulary, chunk by chunk, without the matrix [tokens, vocabulary] in memory.

Shapes: N decisions, W hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from covey.llm.model.logprobs import EVERY, LogitGradients, Logits, chunk_bytes, gradient_bytes
from covey.llm.model.minimum_length import Excluded
from covey.llm.native.bindings import Kernels, KernelSet


def exact_kl(
    hidden_NW: Tensor,
    head: Any,
    reference_hidden_NW: Tensor,
    reference_head: Any,
    temperature: float,
    kernels: KernelSet,
    excluded: Excluded | None = None,
) -> Tensor:
    """Exact KL(pi || reference) at each decision: sum_v pi(v) (log pi(v) - log reference(v)), in nats.

    Both are softmaxes of logits divided by the temperature, in fp32 from the logits on. Logits are computed in chunks,
    and recomputed in the backward pass. With z the policy's logits divided by the temperature,
    dKL / dz_v = pi(v) (log pi(v) - log reference(v) - KL).

    Args:
        hidden_NW: the policy's last hidden states at the positions that predict the decisions.
        head: the policy's output layer: a `torch.nn.Linear`, or a module with `weight` and `bias`.
        reference_hidden_NW: the reference's at the same positions; its width may differ.
        reference_head: the reference's output layer. No gradient flows into the reference.
        temperature: sampling temperature.
        kernels: compute the gradient of the output layer if they support the dtype and device of the hidden states.
        excluded: tokens with probability 0 under both policies.

    Returns:
        kl_N in fp32 (in fp64 for fp64 inputs), with a gradient to `hidden_NW` and `head`.
    """
    reference_bias = None if reference_head.bias is None else reference_head.bias.detach()
    return _ExactKL.apply(
        hidden_NW, head.weight, head.bias,
        reference_hidden_NW.detach(), reference_head.weight.detach(), reference_bias, temperature,
        kernels.of(hidden_NW), excluded,
    )  # fmt: skip


class _ExactKL(torch.autograd.Function):
    """`exact_kl` with a chunked backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reference_hidden: Tensor,
        reference_weight: Tensor,
        reference_bias: Tensor | None,
        temperature: float,
        kernels: Kernels | None,
        excluded: Excluded | None,
    ) -> Tensor:
        logits = Logits(hidden, weight, bias, temperature, excluded)
        others = Logits(reference_hidden, reference_weight, reference_bias, temperature, excluded)
        kl = torch.empty(len(hidden), dtype=logits.exact, device=hidden.device)
        log_total, other_log_total = torch.empty_like(kl), torch.empty_like(kl)
        for part in logits.by_decision():
            z, other = logits.divided(part, EVERY), others.divided(part, EVERY)
            log_total[part], other_log_total[part] = z.logsumexp(dim=1), other.logsumexp(dim=1)
            gap = other.neg_().add_(z).add_((other_log_total - log_total)[part, None])
            kl[part] = torch.linalg.vecdot(z.sub_(log_total[part, None]).exp_(), gap)
        ctx.save_for_backward(
            hidden, weight, bias, reference_hidden, reference_weight, reference_bias, log_total, other_log_total, kl
        )
        ctx.temperature, ctx.kernels, ctx.excluded = temperature, kernels, excluded
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, other_hidden, other_weight, other_bias, log_total, other_log_total, kl = ctx.saved_tensors
        logits = Logits(hidden, weight, bias, ctx.temperature, ctx.excluded)
        others = Logits(other_hidden, other_weight, other_bias, ctx.temperature, ctx.excluded)
        gradients = LogitGradients(logits, ctx.kernels, trains_head=ctx.needs_input_grad[1])
        for part in logits.by_token():
            z, other = logits.divided(EVERY, part), others.divided(EVERY, part)
            slope = other.neg_().add_(z).add_((other_log_total - log_total - kl)[:, None])
            slope *= z.sub_(log_total[:, None]).exp_()
            slope.mul_(grad_kl[:, None] / ctx.temperature)
            gradients.add(part, logits.rounded(slope))
        return *gradients.all(), None, None, None, None, None, None


def buffer_bytes(decisions: int, hidden: int, vocabulary: int, itemsize: int, *, trains_head: bool = True) -> int:
    """Bytes that the backward pass of `exact_kl` holds if the reference has the policy's dimensions.

    These are two chunks of logits, the gradients of the policy, and the reference's hidden states.

    Args:
        decisions, hidden, vocabulary: N, W and V.
        itemsize: bytes of a hidden state and of a weight.
        trains_head: whether the output layer is trained.
    """
    chunks = 2 * chunk_bytes(decisions, vocabulary, itemsize)
    gradients = gradient_bytes(decisions, hidden, vocabulary, itemsize, trains_head=trains_head)
    return chunks + gradients + decisions * hidden * itemsize


def returned_bytes(decisions: int, hidden: int, vocabulary: int, itemsize: int, *, trains_head: bool = True) -> int:
    """Bytes of the gradients that the backward pass returns, [V, W] and [N, W]; arguments as in `buffer_bytes`.

    They exist until autograd has added the gradients of the other losses.
    """
    return ((vocabulary if trains_head else 0) + decisions) * hidden * itemsize
