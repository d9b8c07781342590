"""From hidden states to the log-probabilities of chosen tokens, without the matrix [tokens, vocabulary].

Shapes: N decisions, W hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 1024  # decisions whose logits exist at a time: 200 MB in fp32 at a vocabulary of 50,000


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
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        entropy, log_total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for i in range(0, len(hidden), CHUNK):
            part = slice(i, i + CHUNK)
            z = _logits(hidden[part], weight, bias, temperature, exact)
            log_total[part] = z.logsumexp(dim=1)
            logprobs[part] = z.gather(1, tokens[part, None])[:, 0] - log_total[part]
            p = (z - log_total[part, None]).exp_()
            entropy[part] = log_total[part] - p.mul_(z).sum(dim=1)
        ctx.save_for_backward(hidden, weight, bias, tokens, log_total, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, tokens, log_total, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=log_total.dtype, device=weight.device)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=log_total.dtype)
        for i in range(0, len(hidden), CHUNK):
            part = slice(i, i + CHUNK)
            logp = _logits(hidden[part], weight, bias, ctx.temperature, log_total.dtype).sub_(log_total[part, None])
            p = logp.exp()
            grad_z = torch.zeros_like(p)
            if grad_entropy is not None:  # dH/dz = -p (log p + H)
                grad_z = (logp + entropy[part, None]).mul_(p).mul_(-grad_entropy[part, None])
            if grad_logprobs is not None:  # d log p_token / dz = [token] - p
                grad_z.addcmul_(p, grad_logprobs[part, None], value=-1)
                grad_z.scatter_add_(1, tokens[part, None], grad_logprobs[part, None])
            grad_z = grad_z.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad_z @ weight
            grad_weight += grad_z.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_z.sum(dim=0)
        bias_gradient = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), bias_gradient, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)
