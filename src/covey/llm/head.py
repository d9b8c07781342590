"""From hidden states to the log-probabilities of chosen tokens, without the matrix [tokens, vocabulary].

Shapes: N decisions, W hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK = 512  # decisions whose logits exist at a time: 100 MB in fp32 at a vocabulary of 50,000


def token_logprobs(
    hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor | None, tokens_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and entropy of the distribution that it was drawn from, in nats.

    log p = z_token - log sum_v exp(z_v) with z = (W h + b) / temperature, in fp32 from the logits on. Logits are made
    in chunks, and made again for the gradient instead of being kept.

    Args:
        hidden_NW: last hidden states at the positions that predict the tokens.
        weight_VW, bias_V: of the output layer.
        tokens_N: int64.
        temperature: that the tokens were sampled at.

    Returns:
        logprobs_N and entropy_N in fp32 (in fp64 for fp64 inputs). Gradients flow through both.
    """
    return _TokenLogprobs.apply(hidden_NW, weight_VW, bias_V, tokens_N, temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        chunks = LogitChunks(hidden, weight, bias, temperature)
        logprobs = torch.empty(len(hidden), dtype=chunks.exact, device=hidden.device)
        entropy, log_total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        mass = torch.empty_like(chunks.z)
        for part in chunks:
            z = chunks.logits(part)
            top = z.amax(dim=1, keepdim=True)
            p = torch.sub(z, top, out=mass[: len(z)]).exp_()
            total = p.sum(dim=1)
            log_total[part] = top[:, 0] + total.log()
            logprobs[part] = z.gather(1, tokens[part, None])[:, 0] - log_total[part]
            entropy[part] = log_total[part] - torch.linalg.vecdot(p, z) / total
        ctx.save_for_backward(hidden, weight, bias, tokens, log_total, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, tokens, log_total, entropy = ctx.saved_tensors
        chunks = LogitChunks(hidden, weight, bias, ctx.temperature)
        gradients = LogitGradients(chunks)
        for part in chunks:
            logp = chunks.logits(part).sub_(log_total[part, None])
            # d log p_token / dz = [token] - p;  dH / dz = -p (log p + H)
            if grad_entropy is None:
                grad_z = logp.exp_()
                scale = 0.0 if grad_logprobs is None else -grad_logprobs[part, None]
            else:
                scale = -grad_entropy[part, None] * (logp + entropy[part, None])
                scale = scale if grad_logprobs is None else scale - grad_logprobs[part, None]
                grad_z = logp.exp_()
            grad_z.mul_(scale)
            if grad_logprobs is not None:
                grad_z.scatter_add_(1, tokens[part, None], grad_logprobs[part, None])
            gradients.add(part, grad_z)
        return *gradients.summed(), None, None


class LogitChunks:
    """The logits of a few decisions at a time, always in the same memory: fresh pages cost more than the arithmetic."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> None:
        self.hidden, self.weight, self.bias, self.temperature = hidden, weight, bias, temperature
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        shape = (min(CHUNK, len(hidden)), len(weight))
        self.product = hidden.new_empty(shape)
        self.z = self.product if self.exact == hidden.dtype else self.product.new_empty(shape, dtype=self.exact)

    def __iter__(self) -> Iterator[slice]:
        return (slice(i, min(i + CHUNK, len(self.hidden))) for i in range(0, len(self.hidden), CHUNK))

    def logits(self, part: slice) -> Tensor:
        """z of the decisions in `part`; valid until the next call."""
        product = self.product[: part.stop - part.start]
        if self.bias is None:
            torch.mm(self.hidden[part], self.weight.T, out=product)
        else:
            torch.addmm(self.bias, self.hidden[part], self.weight.T, out=product)
        z = self.as_exact(product)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def as_exact(self, product: Tensor) -> Tensor:
        return product if self.z is self.product else self.z[: len(product)].copy_(product)

    def as_input(self, z: Tensor) -> Tensor:
        return z if self.z is self.product else self.product[: len(z)].copy_(z)


class LogitGradients:
    """From the gradients of the logits, a chunk at a time, to those of the hidden states and of the output layer."""

    def __init__(self, chunks: LogitChunks) -> None:
        self.chunks = chunks
        self.hidden = torch.empty_like(chunks.hidden)
        self.weight = torch.zeros(chunks.weight.shape, dtype=chunks.exact, device=chunks.weight.device)
        self.bias = None if chunks.bias is None else torch.zeros_like(chunks.bias, dtype=chunks.exact)

    def add(self, part: slice, grad_z: Tensor) -> None:
        """`grad_z` is that of the logits divided by the temperature; it is overwritten."""
        chunks = self.chunks
        if chunks.temperature != 1.0:
            grad_z /= chunks.temperature
        product = chunks.as_input(grad_z)
        self.hidden[part] = product @ chunks.weight
        self.weight += product.T @ chunks.hidden[part]
        if self.bias is not None:
            self.bias += grad_z.sum(dim=0)

    def summed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the hidden states, the weight and the bias, in the precision of each."""
        dtype = self.chunks.weight.dtype
        return self.hidden, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
