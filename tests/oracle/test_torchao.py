"""Moments in 8 bits against torchao's quantization."""

import pytest
import torch

from covey.runtime.optimizer import QuantizedMoment, dynamic_map

quantization = pytest.importorskip("torchao.optim.quant_utils")


@pytest.mark.parametrize("signed", [True, False])
def test_codes_and_scales_are_those_of_torchao(signed: bool) -> None:
    """torchao rounds a small square to 0, which covey does not: the squares here are above the smallest value."""
    table = torch.tensor(quantization.create_dynamic_map(signed=signed), dtype=torch.float32)
    torch.testing.assert_close(dynamic_map(signed=signed), table, rtol=1e-6, atol=0)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 256, generator=generator) * 10 ** (torch.rand(64, 256, generator=generator) * 4 - 8)
    values = values if signed else values.abs() + 1e-5 * values.abs().amax(dim=1, keepdim=True)
    values = values.float()  # the other oracles compute in fp64
    scaled, scales = quantization.scale_tensor(values, 256)
    codes = quantization.quantize_8bit_with_qmap(scaled, table)
    ours = QuantizedMoment.zeros(values, 256, signed=signed)
    ours.write(slice(None), values.view(-1))
    assert torch.equal(ours.scales.view(-1), scales)
    unlike = ours.codes.int() - codes.int()
    assert unlike.abs().max() <= 1
    assert (unlike != 0).float().mean() < 1e-3, "numbers in the middle between two codes"
