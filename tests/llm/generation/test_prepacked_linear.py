"""Packed weights: the same products, inside `with` only, and never out of date."""

import pytest
import torch
from torch import nn

from covey.llm.generation.decoder import PackedLinear, PackedLinears
from helpers.tiny_models import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_side_by_side_multiply_as_each_alone(dtype):
    torch.manual_seed(0)
    layers = [nn.Linear(48, 7, dtype=dtype), nn.Linear(48, 33, bias=True, dtype=dtype)]
    for rows in (1, 5, 64, 130):
        x = torch.randn(rows, 48, dtype=dtype)
        expected = torch.cat([layer(x) for layer in layers], dim=1)
        torch.testing.assert_close(
            PackedLinear(*layers)(x), expected, atol=4e-3 if dtype == torch.bfloat16 else 1e-5, rtol=8e-3
        )


@torch.inference_mode()
def test_weights_that_cannot_be_packed_multiply_as_they_are():
    layer = nn.Linear(48, 7, dtype=torch.float64)
    x = torch.randn(5, 48, dtype=torch.float64)
    assert torch.equal(PackedLinear(layer)(x), layer(x))
    model = tiny_model("llama", dtype=torch.float64)
    assert not PackedLinears(model).packed


@torch.inference_mode()
def test_a_module_multiplies_by_packed_weights_inside_with_alone():
    model = tiny_model("cohere")
    tokens = torch.tensor([[3, 4, 5]])
    before = model(input_ids=tokens).logits
    packed = PackedLinears(model)
    assert len(packed.packed) == 2 * 7 + 1
    with packed:
        torch.testing.assert_close(model(input_ids=tokens).logits, before, atol=1e-4, rtol=0)
    for layer in packed.packed.keys() - {model.get_output_embeddings()}:  # whose weights are the embeddings too
        layer.weight.zero_()
    with packed:  # still the weights from before: these were read, not the module's
        torch.testing.assert_close(model(input_ids=tokens).logits, before, atol=1e-4, rtol=0)
    with pytest.raises(KeyboardInterrupt), packed:
        raise KeyboardInterrupt
    assert (model(input_ids=tokens).logits - before).abs().max() > 0.1
    assert not any("forward" in vars(layer) for layer in packed.packed)
