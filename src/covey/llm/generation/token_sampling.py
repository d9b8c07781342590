"""Token sampling by inversion of the cumulative distribution, with one uniform random number per token.

Shapes: R rows, V vocabulary, C blocks of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from covey.llm.native.bindings import KernelSet
from covey.runtime.device import device_kind

BLOCK = 256  # width of a block: two short cumulative sums replace one over the whole vocabulary
# Rows per chunk of probabilities: 6 MB with a vocabulary of 50,000, which fits into a CPU's cache. A chunk is thirty
# kernels of a GPU.
ROWS = {"cpu": 32, "cuda": 256}


def sample_tokens(
    logits_RV: Tensor, uniforms_R: Tensor, temperature: float, kernels: KernelSet
) -> tuple[Tensor, Tensor]:
    """Tokens drawn from softmax(logits / temperature), and their log-probabilities.

    token = min {v : sum_{w <= v} p_w > u}. The block is found first, from sums over blocks, then the token in it.

    Args:
        logits_RV: of any float dtype; converted to fp32, except fp64.
        uniforms_R: in [0, 1), float64.
        temperature: 0: argmax, with the log-probability at temperature 1.
        kernels: used if they support the dtype and device of the logits; otherwise torch.

    Returns:
        tokens_R (int64) and logprobs_R (nats).

    Raises:
        FloatingPointError: if the logits of a row contain NaN or +infinity, or are all -infinity.
    """
    if temperature == 0.0:
        z_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        total_R = z_RV.logsumexp(dim=1)
        _check_finite(total_R)
        tokens_R = z_RV.argmax(dim=1)
        return tokens_R, z_RV.gather(1, tokens_R[:, None])[:, 0] - total_R
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


def _check_finite(total_R: Tensor) -> None:
    failed = int((~total_R.isfinite()).sum())
    if failed:
        raise FloatingPointError(f"{failed} rows of logits define no distribution")


def _draw(logits_RV: Tensor, uniforms_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    mass_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32), copy=True)
    if temperature != 1.0:
        mass_RV /= temperature
    top_R1 = mass_RV.amax(dim=1, keepdim=True)
    mass_RV.sub_(top_R1).exp_()
    mass_RCV = pad(mass_RV, (0, -mass_RV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    upto_RC = mass_RCV.sum(dim=2).double().cumsum(dim=1)
    total_R = upto_RC[:, -1]
    _check_finite(total_R)

    wanted_R1 = (uniforms_R * total_R)[:, None]
    block_R1 = torch.searchsorted(upto_RC, wanted_R1, right=True).clamp(max=upto_RC.shape[1] - 1)
    inside_RV = mass_RCV.gather(1, block_R1[:, :, None].expand(-1, -1, BLOCK))[:, 0].double()
    before_R1 = upto_RC.gather(1, block_R1) - inside_RV.sum(dim=1, keepdim=True)
    offset_R1 = torch.searchsorted(inside_RV.cumsum(dim=1), wanted_R1 - before_R1, right=True)
    # By rounding, the offset may exceed the block's last token of positive probability; then this token is chosen.
    last_R1 = BLOCK - 1 - (inside_RV.flip(1) > 0).int().argmax(dim=1, keepdim=True)
    tokens_R1 = block_R1 * BLOCK + torch.minimum(offset_R1, last_R1)
    chosen_R1 = logits_RV.gather(1, tokens_R1).to(mass_RV.dtype) / temperature
    return tokens_R1[:, 0], (chosen_R1 - top_R1)[:, 0] - total_R.log().to(mass_RV.dtype)
