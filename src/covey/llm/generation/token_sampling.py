"""Token sampling by inversion of the cumulative distribution, with one uniform random number per token.

The distribution may be truncated by top-k, top-p, min-p and a minimum length.

An update of the policy needs log-probabilities of the distribution that was sampled. The trainer computes those with a
minimum length (`covey.llm.model.logprobs`). Top-k, top-p and min-p are for sampling without training.

Shapes: R rows, V vocabulary, C blocks of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from covey.core.precision import widened, widest
from covey.llm.native.bindings import KernelSet
from covey.runtime.device import device_kind


@dataclass(frozen=True)
class Truncation:
    """Which tokens of a distribution may be drawn, in the order of transformers: top-k, then top-p of what is left,
    then min-p.
    """

    top_k: int = 0  # the most probable tokens, this many; 0: all
    top_p: float = 1.0  # the most probable tokens whose probabilities add up to this; 1: all
    min_p: float = 0.0  # tokens with at least this fraction of the largest probability; 0: all
    min_new_tokens: int = 0  # no end token is drawn before a completion has this many tokens, without the end token

    @property
    def _cuts_tail(self) -> bool:
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    def after(self, tokens: int) -> Truncation:
        """The truncation of what continues a completion of this many tokens."""
        return replace(self, min_new_tokens=max(self.min_new_tokens - tokens, 0))

    def restricts(self, shortest: int) -> bool:
        """True if a token may not be drawn after `shortest` tokens of a completion."""
        return self._cuts_tail or shortest < self.min_new_tokens

    def apply(self, logits_RV: Tensor, lengths_R: Tensor, end_ids: Tensor, temperature: float) -> Tensor:
        """The logits, with -infinity for the tokens that may not be drawn.

        Args:
            logits_RV: of any float dtype.
            lengths_R: number of tokens that a completion has so far.
            end_ids: token ids that end a completion.
            temperature: divides the logits; 0: argmax, for which only the minimum length matters.
        """
        if self.min_new_tokens:
            logits_RV = logits_RV.clone()
            logits_RV[:, end_ids] = logits_RV[:, end_ids].masked_fill(
                (lengths_R < self.min_new_tokens)[:, None], -torch.inf
            )
        if temperature == 0.0 or not self._cuts_tail:
            return logits_RV
        sorted_RV, order_RV = widened(logits_RV).div(temperature).sort(dim=1, descending=True, stable=True)
        if self.top_k:
            sorted_RV[:, self.top_k :] = -torch.inf
        probability_RV = sorted_RV.softmax(dim=1)
        before_RV = probability_RV.cumsum(dim=1) - probability_RV  # of the more probable tokens
        dropped_RV = (before_RV >= self.top_p) | (probability_RV < self.min_p * probability_RV[:, :1])
        dropped_RV |= sorted_RV == -torch.inf
        dropped_RV[:, 0] = False
        return logits_RV.masked_fill(dropped_RV.scatter(1, order_RV, dropped_RV), -torch.inf)


WHOLE = Truncation()


@dataclass(frozen=True)
class Drawing:
    """How the tokens of a batch are drawn."""

    temperature: float  # divides the logits; 0: argmax
    truncation: Truncation  # tokens that may not be drawn
    end_ids: tuple[int, ...]  # token ids that end a completion


BLOCK = 256  # width of a block: two short cumulative sums replace one over the whole vocabulary
# Rows per chunk of probabilities: 6 MB with a vocabulary of 50,000, which fits into a CPU's cache. A chunk is thirty
# kernels of a GPU.
ROWS = {"cpu": 32, "cuda": 256}


def uniforms_on(device: torch.device, uniforms_R: NDArray[np.float64]) -> Tensor:
    """Uniform numbers on a device, in its widest dtype and still below 1: a token of probability 0 is never drawn."""
    dtype = widest(device)
    return torch.from_numpy(uniforms_R).to(dtype).clamp(max=1.0 - torch.finfo(dtype).eps / 2).to(device)


def sample_tokens(
    logits_RV: Tensor, uniforms_R: Tensor, temperature: float, kernels: KernelSet
) -> tuple[Tensor, Tensor]:
    """Tokens drawn from softmax(logits / temperature), and their log-probabilities.

    token = min {v : sum_{w <= v} p_w > u}. The block is found first, from sums over blocks, then the token in it.

    Args:
        logits_RV: of any float dtype; converted to fp32, except fp64.
        uniforms_R: in [0, 1), of `uniforms_on`.
        temperature: 0: argmax, with the log-probability at temperature 1.
        kernels: used if they support the dtype and device of the logits; otherwise torch.

    Returns:
        tokens_R (int64) and logprobs_R (nats); NaN if the logits of a row define no distribution: they contain NaN or
        +infinity, or are all -infinity.
    """
    if temperature == 0.0:
        z_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        tokens_R = z_RV.argmax(dim=1)
        return tokens_R, z_RV.gather(1, tokens_R[:, None])[:, 0] - z_RV.logsumexp(dim=1)
    if (native := kernels.of(logits_RV)) is not None:
        return native.sample_tokens(logits_RV.contiguous(), uniforms_R, temperature)
    rows = ROWS[device_kind(logits_RV.device)]
    pieces = zip(logits_RV.split(rows), uniforms_R.split(rows), strict=True)
    tokens, logprobs = zip(*(_draw(logits, uniforms, temperature) for logits, uniforms in pieces), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def buffer_bytes(rows: int, vocabulary: int, device: str) -> int:
    """Bytes of the probabilities of up to `ROWS` rows and of their padded copy, in fp32; `device` is "cpu" or "cuda".

    Only torch holds them, the kernels do not. The padding itself is not counted.
    """
    return 2 * min(rows, ROWS[device]) * vocabulary * torch.float32.itemsize


def _draw(logits_RV: Tensor, uniforms_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    mass_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32), copy=True)
    if temperature != 1.0:
        mass_RV /= temperature
    top_R1 = mass_RV.amax(dim=1, keepdim=True)
    mass_RV.sub_(top_R1).exp_()
    mass_RCV = pad(mass_RV, (0, -mass_RV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    upto_RC = widened(mass_RCV.sum(dim=2)).cumsum(dim=1)
    total_R = upto_RC[:, -1]

    wanted_R1 = (uniforms_R * total_R)[:, None]
    block_R1 = torch.searchsorted(upto_RC, wanted_R1, right=True).clamp(max=upto_RC.shape[1] - 1)
    inside_RV = widened(mass_RCV.gather(1, block_R1[:, :, None].expand(-1, -1, BLOCK))[:, 0])
    before_R1 = upto_RC.gather(1, block_R1) - inside_RV.sum(dim=1, keepdim=True)
    offset_R1 = torch.searchsorted(inside_RV.cumsum(dim=1), wanted_R1 - before_R1, right=True)
    # By rounding, the offset may exceed the block's last token of positive probability; then this token is chosen.
    last_R1 = BLOCK - 1 - (inside_RV.flip(1) > 0).int().argmax(dim=1, keepdim=True)
    tokens_R1 = block_R1 * BLOCK + torch.minimum(offset_R1, last_R1)
    tokens_R1.clamp_(max=logits_RV.shape[1] - 1)  # of a row without a distribution
    chosen_R1 = logits_RV.gather(1, tokens_R1).to(mass_RV.dtype) / temperature
    return tokens_R1[:, 0], (chosen_R1 - top_R1)[:, 0] - total_R.log().to(mass_RV.dtype)
