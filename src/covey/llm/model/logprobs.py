"""Log-probabilities of tokens from hidden states, chunk by chunk, without the matrix [tokens, vocabulary] in memory.

Shapes: N decisions, W hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from covey.llm.model.minimum_length import Excluded
from covey.llm.native.bindings import Kernels, KernelSet

CHUNK = 512  # decisions per chunk of logits: 50 MB in bf16 with a vocabulary of 50,000
EXACT_BYTES = torch.float32.itemsize  # of a logit after the division by the temperature


def token_logprobs(
    hidden_NW: Tensor,
    weight_VW: Tensor,
    bias_V: Tensor | None,
    tokens_N: Tensor,
    temperature: float,
    kernels: KernelSet,
    excluded: Excluded | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and entropy of its distribution, in nats.

    log p = z_token - log sum_v exp(z_v) with z = (W h + b) / temperature, in fp32 from the logits on. Logits are
    computed in chunks, and recomputed in the backward pass.

    Args:
        hidden_NW: last hidden states at the positions that predict the tokens.
        weight_VW, bias_V: of the output layer.
        tokens_N: int64.
        temperature: sampling temperature.
        kernels: compute everything after the matrix product if they support the dtype and device of the hidden states.
        excluded: tokens with probability 0; no token of `tokens_N` may be one of its decision.

    Returns:
        logprobs_N and entropy_N in fp32 (in fp64 for fp64 inputs). Gradients flow through both.
    """
    return _TokenLogprobs.apply(hidden_NW, weight_VW, bias_V, tokens_N, temperature, kernels.of(hidden_NW), excluded)


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` with a chunked backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        kernels: Kernels | None,
        excluded: Excluded | None,
    ) -> tuple[Tensor, Tensor]:
        logits = Logits(hidden, weight, bias, temperature, excluded)
        logprobs = torch.empty(len(hidden), dtype=logits.exact, device=hidden.device)
        entropy, log_total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in logits.by_decision():
            if kernels is not None:
                out = logprobs[part], entropy[part], log_total[part]
                kernels.logprob_entropy(logits.products(part, EVERY), tokens[part], temperature, out)
                continue
            z = logits.divided(part, EVERY)
            top = z.amax(dim=1, keepdim=True)
            p = torch.sub(z, top).exp_()
            total = p.sum(dim=1)
            log_total[part] = top[:, 0] + total.log()
            logprobs[part] = z.gather(1, tokens[part, None])[:, 0] - log_total[part]
            entropy[part] = log_total[part] - torch.linalg.vecdot(p, z) / total
        ctx.save_for_backward(hidden, weight, bias, tokens, log_total, entropy)
        ctx.temperature, ctx.kernels, ctx.excluded = temperature, kernels, excluded
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, log_total, entropy = ctx.saved_tensors
        logits = Logits(hidden, weight, bias, ctx.temperature, ctx.excluded)
        kernels: Kernels | None = ctx.kernels
        gradients = LogitGradients(logits, kernels, trains_head=ctx.needs_input_grad[1])
        grad_logprobs, grad_entropy = (None if g is None else g.contiguous() for g in (grad_logprobs, grad_entropy))
        for part in logits.by_token():
            if kernels is not None:
                products = logits.products(EVERY, part)
                kernels.logit_gradients(
                    products, tokens, log_total, entropy, grad_logprobs, grad_entropy, ctx.temperature, part.start
                )
                gradients.add(part, products)
                continue
            logp = logits.divided(EVERY, part).sub_(log_total[:, None])
            # d log p_token / dz = [token] - p;  dH / dz = -p (log p + H)
            scale = torch.zeros_like(log_total[:, None]) if grad_logprobs is None else -grad_logprobs[:, None]
            if grad_entropy is not None:
                scale = scale - grad_entropy[:, None] * (logp + entropy[:, None])
            grad_z = logp.exp_().mul_(scale)
            if grad_logprobs is not None:
                here = (tokens >= part.start) & (tokens < part.stop)
                grad_z[here, tokens[here] - part.start] += grad_logprobs[here]
            gradients.add(part, logits.rounded(grad_z.div_(ctx.temperature)))
        return *gradients.all(), None, None, None, None


class Logits:
    """Chunks of logits in one reused buffer, because new memory pages cost more time than the arithmetic.

    In the forward pass, a chunk has some decisions and the whole vocabulary, over which softmax normalises. In the
    backward pass, it has all decisions and a slice of the vocabulary, so the gradient of these rows of the output layer
    is complete and needs no sum over chunks.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        excluded: Excluded | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.temperature = hidden, weight, bias, temperature
        self.excluded = excluded
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        self.size = chunk_size(len(hidden), len(weight))  # elements of a chunk
        self._products: Tensor | None = None
        self._exact: Tensor | None = None

    def by_decision(self) -> Iterator[slice]:
        return (slice(i, min(i + CHUNK, len(self.hidden))) for i in range(0, len(self.hidden), CHUNK))

    def by_token(self) -> Iterator[slice]:
        if not len(self.hidden):
            return iter([slice(0, len(self.weight))])
        width = max(self.size // len(self.hidden), 1)
        return (slice(v, min(v + width, len(self.weight))) for v in range(0, len(self.weight), width))

    def products(self, decisions: slice, tokens: slice) -> Tensor:
        """W h + b, with the logits of excluded tokens; valid until the next call."""
        hidden, weight = self.hidden[decisions], self.weight[tokens]
        if self._products is None:
            self._products = self.hidden.new_empty(self.size)
        out = self._products[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        if self.bias is None:
            torch.mm(hidden, weight.T, out=out)
        else:
            torch.addmm(self.bias[tokens], hidden, weight.T, out=out)
        return out if self.excluded is None else self.excluded.exclude(out, decisions, tokens)

    def divided(self, decisions: slice, tokens: slice) -> Tensor:
        """z = (W h + b) / temperature in fp32; valid until the next call."""
        products = self.products(decisions, tokens)
        if products.dtype == self.exact:
            z = products
        else:
            if self._exact is None:
                self._exact = self.hidden.new_empty(self.size, dtype=self.exact)
            z = self._exact[: products.numel()].view(products.shape).copy_(products)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def rounded(self, z: Tensor) -> Tensor:
        """`z` in the dtype of the products and in their buffer; `z` must be in the buffer of `divided`."""
        if self._products is None or z.dtype == self._products.dtype:
            return z
        return self._products[: z.numel()].view(z.shape).copy_(z)


EVERY = slice(None)


class LogitGradients:
    """Accumulates the gradients of hidden states, weight and bias from the gradients of chunks of logits.

    Those of weight and bias are None if the output layer is not trained.
    """

    def __init__(self, logits: Logits, kernels: Kernels | None, *, trains_head: bool) -> None:
        self.logits, self.kernels = logits, kernels
        self.hidden = torch.zeros_like(logits.hidden, dtype=logits.exact)
        self.weight = torch.empty_like(logits.weight) if trains_head else None
        self.bias = None if logits.bias is None or not trains_head else torch.empty_like(logits.bias)

    def add(self, tokens: slice, gradient: Tensor) -> None:
        """Add a chunk; `gradient` is that of W h + b for all decisions and these tokens, in the dtype of W."""
        self.hidden += gradient @ self.logits.weight[tokens]
        if self.weight is None:
            return
        if self.kernels is None:
            torch.mm(gradient.T, self.logits.hidden, out=self.weight[tokens])
        else:
            self.kernels.weight_gradients(self.logits.hidden.contiguous(), [gradient], [self.weight[tokens]])
        if self.bias is not None:
            self.bias[tokens] = gradient.sum(dim=0)

    def all(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of the hidden states, the weight and the bias."""
        return self.hidden.to(self.logits.hidden.dtype), self.weight, self.bias


def chunk_size(decisions: int, vocabulary: int) -> int:
    """Number of logits that exist at a time: of CHUNK decisions, and at least one of every decision."""
    return max(min(CHUNK, decisions) * vocabulary, decisions)


def chunk_bytes(decisions: int, vocabulary: int, itemsize: int) -> int:
    """Bytes of the two buffers of `Logits` after `divided`: the products of `itemsize` bytes, and, if that is not fp32,
    a copy in fp32."""
    return chunk_size(decisions, vocabulary) * (itemsize + (0 if itemsize == EXACT_BYTES else EXACT_BYTES))


def gradient_bytes(decisions: int, hidden: int, vocabulary: int, itemsize: int, *, trains_head: bool = True) -> int:
    """Bytes of `LogitGradients` without a bias: [N, W] in fp32, and [V, W] of `itemsize` bytes if it is trained."""
    return decisions * hidden * EXACT_BYTES + (vocabulary * hidden * itemsize if trains_head else 0)


def buffer_bytes(
    decisions: int,
    hidden: int,
    vocabulary: int,
    itemsize: int,
    *,
    native: bool,
    has_entropy_bonus: bool,
    trains_head: bool = True,
) -> int:
    """Largest number of bytes that `token_logprobs` holds at a time, in the forward or in the backward pass.

    The products that torch sums for the entropy, of the size of the probabilities, are not counted.

    Args:
        decisions, hidden, vocabulary: N, W and V.
        itemsize: bytes of a hidden state and of a weight.
        native: whether covey's kernels compute what follows the product.
        has_entropy_bonus: whether a gradient flows through the entropy.
        trains_head: whether the output layer is trained.
    """
    gradients = gradient_bytes(decisions, hidden, vocabulary, itemsize, trains_head=trains_head)
    if native:
        return chunk_size(decisions, vocabulary) * itemsize + gradients
    probabilities = chunk_size(decisions, vocabulary) * EXACT_BYTES
    for_entropy = 2 * probabilities if has_entropy_bonus else 0  # the slope of the entropy, and its product with p
    return chunk_bytes(decisions, vocabulary, itemsize) + max(probabilities, for_entropy + gradients)
