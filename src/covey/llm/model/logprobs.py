"""Log-probabilities of tokens from hidden states, chunk by chunk, without the matrix [tokens, vocabulary] in memory;
exact divergences between two output layers in the same way; the tokens that a minimum length excludes.

Shapes: B rollouts, T actions, N decisions, W hidden width, V vocabulary, K tokens of a chunk of the vocabulary, E end
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from covey.core.kl import FORWARD, REVERSE
from covey.data import Batch
from covey.llm.model.lora import with_present_adapter
from covey.llm.model.prefix_attention import PackedLayout, forward
from covey.llm.native.bindings import Kernels, KernelSet

EXCLUDED_LOGIT = -1e30  # probability 0, but finite: -infinity times a probability of 0 would be NaN in the entropy


@dataclass(frozen=True)
class MinimumLength:
    """End tokens are excluded at the first `tokens` decisions of every turn; a completion is one turn."""

    tokens: int = 0  # 0: no minimum
    end_ids: frozenset[int] = frozenset()

    def early(self, mask_BT: Tensor) -> Tensor | None:
        """True at the decisions without end tokens; None if there is no minimum.

        A turn is a stretch of decisions: the first column and every decision after an undecided action begin one.

        Args:
            mask_BT: True at decisions.
        """
        if not self.tokens:
            return None
        column_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
        undecided_BT = torch.where(mask_BT, -1, column_T).cummax(dim=1).values  # the last one so far
        return mask_BT & (column_T - undecided_BT <= self.tokens)

    def excluded(self, early_N: Tensor | None) -> Excluded | None:
        """The end tokens of the decisions where `early_N` is True; None if it is None."""
        if early_N is None:
            return None
        return Excluded(early_N, torch.tensor(sorted(self.end_ids), dtype=torch.int64, device=early_N.device))


@dataclass(frozen=True, eq=False)
class Excluded:
    """Tokens with probability 0 at some of N decisions."""

    rows_N: Tensor  # bool, True at these decisions
    ids_E: Tensor  # int64

    def exclude(self, logits: Tensor, decisions: slice, tokens: slice) -> Tensor:
        """Set the logits of the excluded tokens, in place.

        Args:
            logits: [decisions, tokens], not yet divided by the temperature.
            decisions, tokens: the rows and the part of the vocabulary that they are, without a step.
        """
        first = tokens.start or 0
        inside_E = (self.ids_E >= first) & (self.ids_E < first + logits.shape[1])
        ids_E = self.ids_E[inside_E] - first
        logit = max(EXCLUDED_LOGIT, torch.finfo(logits.dtype).min)
        logits[:, ids_E] = logits[:, ids_E].masked_fill(self.rows_N[decisions, None], logit)
        return logits


NO_MINIMUM = MinimumLength()


CHUNK = 512  # decisions per chunk of logits: 50 MB in bf16 with a vocabulary of 50,000
BYTES_OF_LOGIT = 256  # of a GPU's memory for each logit of a chunk, which may then have more decisions
ALIGNED = 64  # tokens of a part of the vocabulary on a GPU: a multiple, as the fast kernels of its products need
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
        gpu_bytes = torch.cuda.get_device_properties(hidden.device).total_memory if hidden.is_cuda else None
        self.decisions = chunk_decisions(len(weight), gpu_bytes)
        self.size = chunk_size(len(hidden), len(weight), gpu_bytes)  # elements of a chunk
        self._products: Tensor | None = None
        self._exact: Tensor | None = None

    def by_decision(self) -> Iterator[slice]:
        count, step = len(self.hidden), self.decisions
        return (slice(i, min(i + step, count)) for i in range(0, count, step))

    def by_token(self) -> Iterator[slice]:
        if not len(self.hidden):
            return iter([slice(0, len(self.weight))])
        width = max(self.size // len(self.hidden), 1)
        width -= width % ALIGNED if self.hidden.is_cuda and width > ALIGNED else 0
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


def chunk_decisions(vocabulary: int, gpu_bytes: int | None = None) -> int:
    """Decisions of a chunk: CHUNK, and more on a GPU with memory for them, because every chunk has its launches and a
    pass over the gradient of all hidden states.

    Args:
        gpu_bytes: memory of the GPU; None on a CPU.
    """
    return CHUNK if gpu_bytes is None else max(gpu_bytes // BYTES_OF_LOGIT // vocabulary // CHUNK, 1) * CHUNK


def chunk_size(decisions: int, vocabulary: int, gpu_bytes: int | None = None) -> int:
    """Number of logits that exist at a time: of `chunk_decisions`, and at least one of every decision."""
    return max(min(chunk_decisions(vocabulary, gpu_bytes), decisions) * vocabulary, decisions)


def chunk_bytes(decisions: int, vocabulary: int, itemsize: int, gpu_bytes: int | None = None) -> int:
    """Bytes of the two buffers of `Logits` after `divided`: the products of `itemsize` bytes, and, if that is not fp32,
    a copy in fp32."""
    return chunk_size(decisions, vocabulary, gpu_bytes) * (itemsize + (0 if itemsize == EXACT_BYTES else EXACT_BYTES))


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
    gpu_bytes: int | None = None,
) -> int:
    """Largest number of bytes that `token_logprobs` holds at a time, in the forward or in the backward pass.

    The products that torch sums for the entropy, of the size of the probabilities, are not counted.

    Args:
        decisions, hidden, vocabulary: N, W and V.
        itemsize: bytes of a hidden state and of a weight.
        native: whether covey's kernels compute what follows the product.
        has_entropy_bonus: whether a gradient flows through the entropy.
        trains_head: whether the output layer is trained.
        gpu_bytes: as in `chunk_decisions`.
    """
    gradients = gradient_bytes(decisions, hidden, vocabulary, itemsize, trains_head=trains_head)
    if native:
        return chunk_size(decisions, vocabulary, gpu_bytes) * itemsize + gradients
    probabilities = chunk_size(decisions, vocabulary, gpu_bytes) * EXACT_BYTES
    for_entropy = 2 * probabilities if has_entropy_bonus else 0  # the slope of the entropy, and its product with p
    return chunk_bytes(decisions, vocabulary, itemsize, gpu_bytes) + max(probabilities, for_entropy + gradients)


def exact_divergence(
    hidden_NW: Tensor,
    head: Any,
    other_hidden_NW: Tensor,
    other_head: Any,
    temperature: float,
    kernels: KernelSet,
    excluded: Excluded | None = None,
    beta: float = REVERSE,
) -> Tensor:
    """Exact divergence between pi and another policy at each decision, in nats (`covey.core.kl.jensen_shannon`).

    Both are softmaxes of logits divided by the temperature, in fp32 from the logits on. Logits are computed in chunks,
    and recomputed in the backward pass. With z the policy's logits divided by the temperature, q the other policy and
    m the mixture, the gradients are

        reverse KL(pi || q):  dD / dz_v = pi(v) (log pi(v) - log q(v) - D)
        forward KL(q || pi):  dD / dz_v = pi(v) - q(v)
        between them:         dD / dz_v = (1 - beta) pi(v) (log pi(v) - log m(v) - KL(pi || m))

    Args:
        hidden_NW: the policy's last hidden states at the positions that predict the decisions.
        head: the policy's output layer: a `torch.nn.Linear`, or a module with `weight` and `bias`.
        other_hidden_NW: the other policy's at the same positions; its width may differ.
        other_head: the other policy's output layer. No gradient flows into it. If one layer has more tokens than the
            other, as padded ones have, both are softmaxes over the tokens of the smaller one.
        temperature: sampling temperature.
        kernels: compute the gradient of the output layer if they support the dtype and device of the hidden states.
        excluded: tokens with probability 0 under both policies.
        beta: weight of the other policy in the mixture; 0 is the forward KL, 1 the reverse.

    Returns:
        divergence_N in fp32 (in fp64 for fp64 inputs), with a gradient to `hidden_NW` and `head`.
    """
    common = min(len(head.weight), len(other_head.weight))
    own, others = (
        [part if part is None or len(part) == common else part[:common] for part in (layer.weight, layer.bias)]
        for layer in (head, other_head)
    )
    others = [None if part is None else part.detach() for part in others]
    return _ExactDivergence.apply(
        hidden_NW, *own, other_hidden_NW.detach(), *others, temperature, kernels.of(hidden_NW), excluded, beta
    )


class _ExactDivergence(torch.autograd.Function):
    """`exact_divergence` with a chunked backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        other_hidden: Tensor,
        other_weight: Tensor,
        other_bias: Tensor | None,
        temperature: float,
        kernels: Kernels | None,
        excluded: Excluded | None,
        beta: float,
    ) -> Tensor:
        logits = Logits(hidden, weight, bias, temperature, excluded)
        others = Logits(other_hidden, other_weight, other_bias, temperature, excluded)
        divergence = torch.empty(len(hidden), dtype=logits.exact, device=hidden.device)
        log_total, other_log_total, centre = (torch.empty_like(divergence) for _ in range(3))
        for part in logits.by_decision():
            z, other = logits.divided(part, EVERY), others.divided(part, EVERY)
            log_total[part], other_log_total[part] = z.logsumexp(dim=1), other.logsumexp(dim=1)
            divergence[part], centre[part] = _divergence(z, other, log_total[part], other_log_total[part], beta)
        ctx.save_for_backward(
            hidden, weight, bias, other_hidden, other_weight, other_bias, log_total, other_log_total, centre
        )
        ctx.temperature, ctx.kernels, ctx.excluded, ctx.beta = temperature, kernels, excluded, beta
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, other_hidden, other_weight, other_bias, log_total, other_log_total, centre = (
            ctx.saved_tensors
        )
        logits = Logits(hidden, weight, bias, ctx.temperature, ctx.excluded)
        others = Logits(other_hidden, other_weight, other_bias, ctx.temperature, ctx.excluded)
        gradients = LogitGradients(logits, ctx.kernels, trains_head=ctx.needs_input_grad[1])
        for part in logits.by_token():
            z, other = logits.divided(EVERY, part), others.divided(EVERY, part)
            slope = _slope(z, other, log_total, other_log_total, centre, ctx.beta)
            gradients.add(part, logits.rounded(slope.mul_(grad[:, None] / ctx.temperature)))
        return *gradients.all(), None, None, None, None, None, None, None


def _divergence(
    z: Tensor, other: Tensor, log_total: Tensor, other_log_total: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Divergence of some decisions, and the mean under pi that `_slope` subtracts. Overwrites both logits."""
    if beta == REVERSE:
        gap = other.neg_().add_(z).add_((other_log_total - log_total)[:, None])
        kl = torch.linalg.vecdot(z.sub_(log_total[:, None]).exp_(), gap)
        return kl, kl
    own, theirs = z.sub_(log_total[:, None]), other.sub_(other_log_total[:, None])
    if beta == FORWARD:
        gap = own.neg_().add_(theirs)
        return torch.linalg.vecdot(theirs.exp_(), gap), torch.zeros_like(log_total)
    mixture = _log_mixture(own, theirs, beta)
    to_mixture, from_teacher = (torch.linalg.vecdot(one.exp(), one - mixture) for one in (own, theirs))
    return beta * from_teacher + (1 - beta) * to_mixture, to_mixture


def _slope(z: Tensor, other: Tensor, log_total: Tensor, other_log_total: Tensor, centre: Tensor, beta: float) -> Tensor:
    """Gradient of the divergence with respect to z for some tokens, in the memory of `other`. Overwrites z too."""
    if beta == REVERSE:
        slope = other.neg_().add_(z).add_((other_log_total - log_total - centre)[:, None])
        slope *= z.sub_(log_total[:, None]).exp_()
        return slope
    own, theirs = z.sub_(log_total[:, None]), other.sub_(other_log_total[:, None])
    if beta == FORWARD:
        return theirs.exp_().neg_().add_(own.exp_())
    slope = torch.sub(own, _log_mixture(own, theirs, beta), out=theirs).sub_(centre[:, None])
    return slope.mul_(own.exp_()).mul_(1 - beta)


def _log_mixture(own: Tensor, theirs: Tensor, beta: float) -> Tensor:
    """log(beta q + (1 - beta) pi) of logarithms of probabilities."""
    return torch.logaddexp(own + math.log1p(-beta), theirs + math.log(beta))


def divergence_bytes(
    decisions: int,
    hidden: int,
    vocabulary: int,
    itemsize: int,
    *,
    trains_head: bool = True,
    gpu_bytes: int | None = None,
    beta: float = REVERSE,
) -> int:
    """Bytes that the backward pass of `exact_divergence` holds if the other policy has the policy's dimensions.

    These are two chunks of logits, three more in fp32 for a mixture, the gradients of the policy, and the other
    policy's hidden states.

    Args:
        decisions, hidden, vocabulary: N, W and V.
        itemsize: bytes of a hidden state and of a weight.
        trains_head: whether the output layer is trained.
        gpu_bytes: as in `chunk_decisions`.
        beta: of the divergence.
    """
    chunks = 2 * chunk_bytes(decisions, vocabulary, itemsize, gpu_bytes)
    if beta not in (FORWARD, REVERSE):
        chunks += 3 * chunk_size(decisions, vocabulary, gpu_bytes) * EXACT_BYTES
    gradients = gradient_bytes(decisions, hidden, vocabulary, itemsize, trains_head=trains_head)
    return chunks + gradients + decisions * hidden * itemsize


def divergence_returned_bytes(
    decisions: int, hidden: int, vocabulary: int, itemsize: int, *, trains_head: bool = True
) -> int:
    """Bytes of the gradients that the backward pass returns, [V, W] and [N, W]; arguments as in `divergence_bytes`.

    They exist until autograd has added the gradients of the other losses.
    """
    return ((vocabulary if trains_head else 0) + decisions) * hidden * itemsize


@dataclass(frozen=True)
class ActionHiddenStates:
    """The hidden state that predicts each decision of a batch.

    Equal decisions of one group after a common prefix have one entry: N distinct decisions for D decisions.
    """

    hidden_NW: Tensor
    actions_N: Tensor
    index_D: Tensor  # index of each decision's entry, 0 to N - 1
    position_D: Tensor  # position of each decision in the flattened mask_BT
    batch: Batch
    early_N: Tensor | None = None  # True at the entries of the decisions that were marked as early; None without marks

    def scatter_to_batch(self, value_N: Tensor) -> Tensor:
        """value_BT: the value of each decision; 0 at undecided columns."""
        return scatter_to_batch(value_N[self.index_D], self.position_D, self.batch)

    def of_decisions(self) -> ActionHiddenStates:
        """The same with an entry for each decision, in the order of the decisions."""
        early_N = None if self.early_N is None else self.early_N[self.index_D]
        return replace(
            self, hidden_NW=self.hidden_NW[self.index_D], actions_N=self.actions_N[self.index_D],
            index_D=torch.arange(len(self.index_D), device=self.index_D.device), early_N=early_N,
        )  # fmt: skip


def hidden_states_for_actions(
    model: nn.Module, batch: Batch, *, packed: bool, early_BT: Tensor | None = None
) -> ActionHiddenStates:
    """Forward pass of a decoder without its output layer over a batch.

    Undecided tokens before a row's last decision are fed too, because later decisions attend to them.

    Args:
        model: a `base_model`.
        batch: on the device of the model.
        packed: feed all rows as one row of tokens, with each group's prompt once. Only for models whose attention takes
            a layout. Otherwise, the rollouts are fed one by one, and recomputed in the backward pass to bound memory.
        early_BT: marks of decisions (`MinimumLength.early`). Only decisions with equal marks share an entry.
    """
    position_D = batch.mask_BT.flatten().nonzero()[:, 0]
    actions_D = batch.actions_BT.flatten()[position_D]
    if packed:
        hidden_LW, source_BT = _packed(model, batch)
        source_D = source_BT.flatten().to(position_D.device)[position_D]
        actions = int(batch.actions_BT.max()) + 1
        key_D, early_D = source_D * actions + actions_D, _marks(early_BT, position_D)
        if early_D is not None:
            key_D = 2 * key_D + early_D
        decided_N, index_D = key_D.unique(return_inverse=True)
        early_N = None
        if early_D is not None:
            decided_N, early_N = decided_N // 2, decided_N % 2 == 1
        return ActionHiddenStates(
            hidden_LW[decided_N // actions], decided_N % actions, index_D, position_D, batch, early_N
        )
    rows, compute = [], with_present_adapter(model, _row)
    for row, length in enumerate(row_lengths(batch)):
        hidden_TW = checkpoint(compute, model, row_tokens(batch, row, length), length, use_reentrant=False)
        rows.append(hidden_TW[batch.mask_BT[row, :length]])
    return ActionHiddenStates(
        torch.cat(rows), actions_D, torch.arange(len(position_D), device=position_D.device), position_D, batch,
        _marks(early_BT, position_D),
    )  # fmt: skip


def _marks(early_BT: Tensor | None, position_D: Tensor) -> Tensor | None:
    return None if early_BT is None else early_BT.flatten()[position_D]


def kept_bytes(decisions: int, hidden: int, itemsize: int) -> int:
    """Bytes of `ActionHiddenStates.hidden_NW` for decisions that all differ."""
    return decisions * hidden * itemsize


def row_lengths(batch: Batch) -> list[int]:
    """Number of columns up to and including the last decision of each row."""
    return [int(n) for n in batch.mask_BT.shape[1] - batch.mask_BT.flip(1).int().argmax(dim=1)]


def row_tokens(batch: Batch, row: int, length: int) -> Tensor:
    """tokens_L of one rollout: the prompt and the first `length` actions, decided or not."""
    prompt = torch.tensor(batch.context[row], device=batch.actions_BT.device)
    return torch.cat([prompt, batch.actions_BT[row, :length]])


def scatter_to_batch(value_D: Tensor, position_D: Tensor, batch: Batch) -> Tensor:
    """value_BT with the value of each decision at its position in the flattened mask; 0 at undecided columns."""
    blank = torch.zeros(batch.mask_BT.numel(), dtype=value_D.dtype, device=value_D.device)
    return blank.index_copy(0, position_D, value_D).view_as(batch.mask_BT)


def _packed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """hidden_LW of one packed forward pass, and source_BT, the index of the token that predicts each column.

    The prompt's last token predicts the first column, every other column is predicted by the one before it. The last
    action of a rollout is not fed.
    """
    device, lengths, actions_BT = batch.actions_BT.device, row_lengths(batch), batch.actions_BT.cpu()
    prompts: list[Any] = []
    prompt_of_row: list[int] = []
    previous = -1
    for row, group in enumerate(batch.group_B.tolist()):
        if group != previous:
            prompts.append(batch.context[row])
            previous = group
        prompt_of_row.append(len(prompts) - 1)
    completions = [actions_BT[row, : n - 1] for row, n in enumerate(lengths)]
    layout = PackedLayout(prompts, completions, prompt_of_row, device)
    hidden_LW = forward(model, layout.tokens, layout.positions, layout)

    source_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.int64)
    source_BT[:, 0] = layout.prompt_ends[prompt_of_row]
    for source_T, token_index in zip(source_BT, layout.token_index, strict=True):
        source_T[1 : 1 + len(token_index)] = token_index
    return hidden_LW, source_BT


def _row(model: nn.Module, tokens_L: Tensor, decisions: int) -> Tensor:
    """hidden_TW at the positions that predict the last `decisions` tokens."""
    hidden_LW: Tensor = model(input_ids=tokens_L[None, :-1], use_cache=False).last_hidden_state[0]
    return hidden_LW[-decisions:]
