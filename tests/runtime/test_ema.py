"""Weights that follow others: a copy, a moving average, in any precision, and what a checkpoint needs of them."""

import pytest
import torch
from torch import Tensor, nn

from covey.config import ConfigError
from covey.runtime.optimizer import EMAWeights


def linear(value: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    module = nn.Linear(2, 2, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def value_of(module: nn.Linear) -> float:
    values = {float(x) for parameter in module.parameters() for x in parameter.detach().flatten()}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_share_of_one_copies(dtype):
    module, leader = linear(1.0, dtype), linear(0.3, dtype)
    average = EMAWeights(module, leader, 1.0)
    average.update()
    assert value_of(module) == value_of(leader)
    with torch.no_grad():
        leader.weight.add_(1)
    assert not torch.equal(module.weight, leader.weight), "a copy shares no memory"


def test_a_share_goes_that_part_of_the_way():
    module, leader = linear(1.0), linear(2.0)
    average = EMAWeights(module, leader, 0.25)
    average.update()
    assert value_of(module) == 1.25  # 1 + 0.25 * (2 - 1)
    average.update()
    assert value_of(module) == 1.4375  # 1.25 + 0.25 * 0.75


def test_small_moves_add_up_in_bf16():
    # bf16 has steps of 1/128 between 1 and 2: one move of 0.001 would round away, and so would every other.
    module, leader = linear(1.0, torch.bfloat16), linear(2.0, torch.bfloat16)
    average = EMAWeights(module, leader, 0.001)
    average.update()
    assert value_of(module) == 1.0
    for _ in range(99):
        average.update()
    assert value_of(module) == pytest.approx(2 - 0.999**100, abs=1 / 128)  # 1.095


def test_shared_parameters_count_once():
    module, leader = nn.Sequential(linear(1.0), linear(1.0)), nn.Sequential(linear(2.0), linear(2.0))
    for tied in (module, leader):
        tied[1].weight = tied[0].weight
    average = EMAWeights(module, leader, 0.5)
    assert sorted(average.state_dict()) == ["0.bias", "0.weight", "1.bias"]
    average.update()
    assert value_of(module[1]) == 1.5


@pytest.mark.parametrize("share", [1.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_with_the_same_bits(share, dtype):
    def run(steps: int, average: EMAWeights, leader: nn.Linear, begin: int = 0) -> None:
        for step in range(begin, begin + steps):
            with torch.no_grad():
                leader.weight.copy_(torch.full((2, 2), 1.0 + 0.37 * step))
            average.update()

    whole, leader = linear(1.0, dtype), linear(1.0, dtype)
    run(20, EMAWeights(whole, leader, share), leader)
    first = EMAWeights(linear(1.0, dtype), leader, share)
    run(9, first, leader)
    state: dict[str, Tensor] = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    resumed_module = linear(1.0, dtype)
    resumed = EMAWeights(resumed_module, leader, share)
    resumed.load_state_dict(state)
    run(11, resumed, leader, begin=9)
    assert torch.equal(resumed_module.weight, whole.weight)
    assert float(whole.weight[0, 0].detach()) > 1


def test_a_state_of_another_module_is_refused():
    average = EMAWeights(linear(1.0), linear(2.0), 1.0)
    with pytest.raises(ConfigError, match="belongs to another model"):
        average.load_state_dict({"weight": torch.zeros(2, 2)})
