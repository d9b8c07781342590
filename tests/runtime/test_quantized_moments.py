"""AdamW's moments in 8 bits: the codes, their rounding, and training with them."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from covey.config import ConfigError
from covey.runtime.optimizer import AdamW, MasterAdamW, QuantizedMoment, block_length, dynamic_map, state_bytes

SHAPES = [(96, 576), (64, 64), (33, 3 * 256), (40, 8, 16)]
BETAS = (0.9, 0.99)


def numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Numbers of many magnitudes, with zeros and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 8 - 10)
    drawn[0] = 0
    drawn.view(-1)[1000] = 0
    return drawn


def quantized(values: Tensor, *, signed: bool) -> tuple[QuantizedMoment, Tensor]:
    length = block_length(values.shape)
    assert length is not None
    moment = QuantizedMoment.zeros(values, length, signed=signed)
    assert torch.equal(moment.read(slice(None)), torch.zeros(values.numel()))
    moment.write(slice(None), values.reshape(-1))
    return moment, moment.read(slice(None)).view_as(values)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_has_the_values_of_the_paper(signed: bool) -> None:
    values = dynamic_map(signed=signed)
    assert len(values) == 256
    assert torch.equal(values, values.sort().values)
    assert values[-1] == 1
    # The last decade of 64 (128) intervals: its ends are half an interval from 0.1 and 1. The first has 1 (2).
    count = 64 if signed else 128
    half = 0.9 / count / 2
    positive = values[values > 0]
    assert positive[-2] == pytest.approx(1 - half)
    assert positive[-1 - count] == pytest.approx(0.1 + half)
    first = [0.55e-6] if signed else [0.325e-6, 0.775e-6]
    assert positive[: len(first)].tolist() == pytest.approx(first)
    assert (values == 0).sum() == 1
    assert torch.equal(-values[values < 0].flip(0), positive[:-1]) or not signed


@pytest.mark.sampled(6)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_number_becomes_the_nearest_value_of_its_block(shape: tuple[int, ...], signed: bool) -> None:
    values = numbers(shape) if signed else numbers(shape).square()
    _, found = quantized(values, signed=signed)
    length = block_length(shape)
    assert length is not None
    blocks = values.reshape(-1, length)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    table = dynamic_map(signed=signed)
    if not signed:
        table = table[1:]  # 0 stands for nothing but 0
    distance = (blocks[..., None].double() - scales.double()[..., None] * table.double()).abs()
    nearest = distance.min(dim=-1).values
    missed = (found.reshape(-1, length).double() - blocks.double()).abs()
    assert bool((missed <= nearest * (1 + 1e-5) + scales * 1e-7)[blocks != 0].all())
    assert torch.equal(found == 0, values == 0) or signed
    assert bool((found[values == 0] == 0).all())


def test_a_value_of_the_map_is_kept() -> None:
    for signed in (True, False):
        values = dynamic_map(signed=signed).repeat(16, 1)
        assert torch.equal(quantized(values, signed=signed)[1], values)


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ((49152, 576), 192),
        ((1536, 576), 192),
        ((576, 1536), 256),
        ((768, 3072), 256),
        ((128, 32), 32),
        ((4096,), None),
        ((10, 256), None),
        ((5000, 31), None),
        ((1000, 251), 251),
    ],
)
def test_blocks_lie_within_rows(shape: tuple[int, ...], length: int | None) -> None:
    assert block_length(shape) == length


def stepped(master: Tensor, gradients: list[Tensor], *, eight_bit: bool) -> AdamW:
    length = block_length((4096, master[0].numel()))  # of the whole tensor, also for a part of it
    adamw = AdamW({"w": master}, BETAS, {"w": 0.1}, {"w": length} if eight_bit and length else {})
    for gradient in gradients:
        master.grad = gradient.clone()
        adamw.step(1e-3)
    return adamw


@pytest.mark.parametrize("shape", [(300, 576), (2000, 192), (130, 2048)], ids=str)
def test_a_step_is_that_of_the_moments_as_they_are_read(shape: tuple[int, ...]) -> None:
    """The definition: moments are decoded, AdamW of torch computes in fp32, and they are encoded."""
    gradients = [numbers(shape, seed) for seed in range(3)]
    start = numbers(shape, 9)
    found, expected = start.clone(), nn.Parameter(start.clone())
    stepped(found, gradients, eight_bit=True)
    torchs = torch.optim.AdamW([expected], lr=1e-3, betas=BETAS, weight_decay=0.1)
    for gradient in gradients:
        expected.grad = gradient.clone()
        torchs.step()
        state = torchs.state[expected]
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[name].copy_(quantized(state[name], signed=signed)[1])
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", [2, 4, 7])
def test_parts_of_a_tensor_have_the_bits_of_the_whole(parts: int) -> None:
    shape = (1100, 576)
    start, gradients = numbers(shape), [numbers(shape, seed) for seed in (1, 2)]
    whole = start.clone()
    stepped(whole, gradients, eight_bit=True)
    rows = []
    for one, *several in zip(start.chunk(parts), *(gradient.chunk(parts) for gradient in gradients), strict=True):
        part = one.clone()
        stepped(part, several, eight_bit=True)
        rows.append(part)
    assert torch.equal(whole, torch.cat(rows))


def test_a_small_second_moment_makes_no_large_step() -> None:
    """Beside one large gradient in the block, the squares of the others are below the smallest value of the map."""
    master = torch.zeros(64, 256)
    small = torch.full((64, 256), 1e-5)
    small[:, 0] = 1.0
    none = torch.zeros(64, 256)
    stepped(master, [small, none, none], eight_bit=True)
    assert master.abs().max() < 3 * 1e-3 * 1.1, "at most the learning rate in each step"


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 64))


def train(module: Regression, optimizer: MasterAdamW, steps: range) -> float:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(256, 64, generator=generator)
        loss = (module.layers(x.to(module.layers[0].weight.dtype)).float() - x.flip(1).sin()).square().mean()
        loss.backward()
        optimizer.step(3e-3)
    return float(loss.detach())


@pytest.mark.slow
def test_training_comes_as_far_as_with_fp32_moments() -> None:
    losses = []
    for eight_bit in (False, True):
        module = Regression()
        losses.append(train(module, MasterAdamW(module, 3e-3, eight_bit_moments=eight_bit), range(300)))
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert losses[1] != losses[0]
    assert losses[1] < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_and_loaded_state_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    module = Regression().to(dtype)
    optimizer = MasterAdamW(module, 3e-3, eight_bit_moments=True)
    train(module, optimizer, range(5))
    file = io.BytesIO()
    torch.save(copy.deepcopy(optimizer.state_dict()), file)
    train(module, optimizer, range(5, 10))
    file.seek(0)
    resumed = Regression().to(dtype)
    again = MasterAdamW(resumed, 3e-3, eight_bit_moments=True)
    again.load_state_dict(torch.load(file))
    train(resumed, again, range(5, 10))
    for one, other in zip(module.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("eight_bit", [False, True])
def test_moments_of_another_precision_are_refused(eight_bit: bool) -> None:
    module = Regression()
    optimizer = MasterAdamW(module, 3e-3, eight_bit_moments=eight_bit)
    train(module, optimizer, range(1))
    other = MasterAdamW(Regression(), 3e-3, eight_bit_moments=not eight_bit)
    with pytest.raises(ConfigError, match=r"set update\.eight_bit_moments as it was"):
        other.load_state_dict(optimizer.state_dict())


def test_the_state_takes_the_bytes_that_are_planned() -> None:
    module = nn.Linear(1024, 1024, bias=False)
    optimizer = MasterAdamW(module, 1e-3, eight_bit_moments=True)
    module(torch.randn(4, 1024)).sum().backward()
    optimizer.step(1e-3)
    state = optimizer.state_dict()
    held = sum(one.nbytes for key in ("exp_avg", "exp_avg_sq") for one in state[key]["weight"].values())
    assert held == state_bytes(1024 * 1024, 4, eight_bit_moments=True).moments
    assert held < state_bytes(1024 * 1024, 4).moments / 3.9
