"""AdamW and the clip norm do not depend on the division of a tensor among ranks."""

import pytest
import torch
from torch import Tensor

from covey.runtime.optimizer import AdamW, row_squares

SHAPES = [(33,), (84, 32), (7, 5), (577, 33), (1, 40)]


def trained(weights: dict[str, Tensor], gradients: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Weights and moments after some steps."""
    adamw = AdamW(weights, (0.9, 0.999), dict.fromkeys(weights, 0.1))
    for of_step in gradients:
        for name, weight in weights.items():
            weight.grad = of_step[name].clone()
        adamw.step(1e-3)
    moments = adamw.moments
    return [weights, {n: m.exp_avg for n, m in moments.items()}, {n: m.exp_avg_sq for n, m in moments.items()}]


@pytest.mark.parametrize("parts", [2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adamw_of_parts_has_the_bits_of_the_whole(shape: tuple[int, ...], parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(3)]

    def divided(tensor: Tensor) -> dict[str, Tensor]:
        return {str(number): part.clone() for number, part in enumerate(tensor.chunk(parts))}

    expected = trained({"0": whole.clone()}, [{"0": one} for one in gradients])
    found = trained(divided(whole), [divided(one) for one in gradients])
    for one, several in zip(expected, found, strict=True):
        assert torch.equal(one["0"], torch.cat(list(several.values())))


@pytest.mark.parametrize("parts", [2, 4, 7])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 600), (3, 70_000), (513, 257), (70_000,)], ids=str)
def test_the_squares_of_a_row_do_not_depend_on_the_other_rows(shape: tuple[int, ...], parts: int) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = [row_squares(part.clone(), whole.numel()) for part in whole.chunk(parts)]
    assert torch.equal(torch.cat(found), row_squares(whole, whole.numel()))
