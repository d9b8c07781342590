"""AdamW with fp32 masters: equal to torch's in fp32, exact over many small steps in bf16, safe with NaN, and
independent of how a tensor is divided.
"""

import copy
import gc
import math

import pytest
import torch
from torch import Tensor, nn

from covey.config import ConfigError
from covey.data import Team
from covey.runtime.checkpoint import CheckpointFolder
from covey.runtime.distributed import own_shards
from covey.runtime.optimizer import AdamW, EMAWeights, MasterAdamW, norm_of, row_squares
from helpers.thread_team import on_ranks

BETAS = (0.9, 0.95)


def make_module(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10)).to(dtype)


def data(step, rows=6):
    return torch.randint(0, 10, (rows, 3), generator=torch.Generator().manual_seed(step))


def loss_of(module, tokens):
    logits = module(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def tensors_of(module, optimizer):
    """A copy of everything that a step may change."""
    state = optimizer.state_dict()
    named = {f"module/{name}": p for name, p in module.named_parameters()}
    for part in ("masters", "exp_avg", "exp_avg_sq"):
        named |= {f"{part}/{name}": tensor for name, tensor in state[part].items()}
    return {name: tensor.detach().clone() for name, tensor in named.items()}, dict(state["step"])


def assert_same(left, right):
    assert left[1] == right[1]
    assert left[0].keys() == right[0].keys()
    for name, tensor in left[0].items():
        assert torch.equal(tensor, right[0][name]), name


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_grad_norm", [0.05, math.inf])
def test_fp32_equals_torch_bitwise(weight_decay, max_grad_norm):
    module, other = make_module(), make_module()
    ours = MasterAdamW(module, 1e-2, BETAS, weight_decay, max_grad_norm)
    matrices = [p for p in other.parameters() if p.dim() == 2]
    vectors = [p for p in other.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=BETAS, fused=True)
    for step in range(10):
        learning_rate = 1e-2 / (step + 1)
        loss_of(module, data(step)).backward()
        loss_of(other, data(step)).backward()
        norm = torch.cat([p.grad.double().flatten() for p in other.parameters()]).norm()
        torch.nn.utils.clip_grads_with_norm_(other.parameters(), max_grad_norm, norm)
        for group in theirs.param_groups:
            group["lr"] = learning_rate
        theirs.step()
        theirs.zero_grad()
        result = ours.step(learning_rate)
        assert result.applied
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-12)
        assert all(p.grad is None for p in module.parameters())
    for mine, reference in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize(
    "shapes", [[(3000, 4000), (70_001,)], [(1,), (255,), (256,), (257, 3), ()], [(0,), (5,)]], ids=str
)
def test_the_norm_is_summed_in_fp64(shapes):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.rand(shape, generator=generator) for shape in shapes]
    exact = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    norm = norm_of([row_squares(tensor, tensor.numel()) for tensor in tensors])
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(exact, rel=1e-9)
    if len(tensors) == 2 and len(tensors[1]) > 5:  # what torch's own is off by
        assert float(torch.nn.utils.get_total_norm(tensors)) != pytest.approx(exact, rel=1e-7)


def test_fp32_parameters_are_their_own_masters():
    module = make_module()
    optimizer = MasterAdamW(module, 1e-3)
    assert all(optimizer.masters[name] is p for name, p in module.named_parameters())


def test_many_tiny_steps_do_not_round_away_in_bf16():
    module, other = nn.Linear(4, 1, bias=False).bfloat16(), nn.Linear(4, 1, bias=False)
    naive = copy.deepcopy(module)
    with torch.no_grad():
        module.weight.fill_(1.0)
        naive.weight.fill_(1.0)
        other.weight.fill_(1.0)
    ours = MasterAdamW(module, 1e-4)
    reference = MasterAdamW(other, 1e-4)
    rounding = torch.optim.AdamW(naive.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(300):  # 300 steps of 1e-4 are 0.03; bf16 cannot move 1.0 by less than 0.002
        module.weight.sum().backward()
        other.weight.sum().backward()
        naive.weight.sum().backward()
        ours.step(1e-4)
        reference.step(1e-4)
        rounding.step()
        rounding.zero_grad()
    assert naive.weight.unique().tolist() == [1.0]
    assert torch.equal(ours.masters["weight"], other.weight)
    assert other.weight.unique().item() == pytest.approx(0.97, abs=1e-4)
    assert torch.equal(module.weight, other.weight.bfloat16())


@pytest.mark.slow
def test_microbatches_add_up_in_fp32():
    module = make_module(torch.bfloat16)
    exact, rounded, single = copy.deepcopy(module).float(), copy.deepcopy(module), copy.deepcopy(module)
    optimizer = MasterAdamW(module, 1e-3)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in single.parameters()]
    for step in range(256):
        for each in (module, exact, rounded, single):
            loss_of(each, data(step)).backward()
        assert all(p.grad is None for p in module.parameters())  # freed at once
        for total, parameter in zip(sums, single.parameters(), strict=True):
            total += parameter.grad
            parameter.grad = None
    ours, theirs, truth, total = (
        torch.cat([gradient.double().flatten() for gradient in gradients])
        for gradients in (
            [master.grad for master in optimizer.masters.values()],
            [p.grad for p in rounded.parameters()],
            [p.grad for p in exact.parameters()],
            sums,
        )
    )
    assert (ours - total).norm() < 1e-6 * total.norm()  # nothing is lost in adding up
    assert (ours - truth).norm() < 0.5 * (theirs - truth).norm()  # only what each backward rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, poison):
    module = make_module(dtype)
    optimizer = MasterAdamW(module, 1e-2)
    loss_of(module, data(0)).backward()
    assert optimizer.step(1e-2).applied
    before = tensors_of(module, optimizer)
    loss_of(module, data(1)).backward()
    (module[1].weight[0, 0] * poison).backward()
    result = optimizer.step(1e-2)
    assert not result.applied
    assert not math.isfinite(result.grad_norm)
    assert_same(tensors_of(module, optimizer), before)
    # The bad gradient is gone: the next step is what it would have been.
    loss_of(module, data(2)).backward()
    after_bad = optimizer.step(1e-2)
    twin = make_module(dtype)
    untouched = MasterAdamW(twin, 1e-2)
    for step in (0, 2):
        loss_of(twin, data(step)).backward()
        expected = untouched.step(1e-2)
    assert after_bad == expected
    assert_same(tensors_of(module, optimizer), tensors_of(twin, untouched))


def test_no_gradient_is_not_applied():
    module = make_module()
    optimizer = MasterAdamW(module, 1e-2, weight_decay=0.1)
    before = tensors_of(module, optimizer)
    result = optimizer.step(1e-2)
    assert (result.grad_norm, result.applied) == (0.0, False)
    assert_same(tensors_of(module, optimizer), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_parameters_count_once(dtype):
    module = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)).to(dtype)
    module[1].weight = module[0].weight
    optimizer = MasterAdamW(module, 1e-2, max_grad_norm=math.inf)
    assert list(optimizer.masters) == ["0.weight"]
    (module[0].weight.sum() + 2 * module[1].weight.sum()).backward()
    assert optimizer.step(1e-2).grad_norm == pytest.approx(3.0 * 4.0)  # sixteen gradients of 3
    assert module[0].weight is module[1].weight


def test_frozen_parameters_are_left_out():
    module = make_module(torch.bfloat16)
    module[0].weight.requires_grad_(False)
    frozen = module[0].weight.clone()
    optimizer = MasterAdamW(module, 1e-2)
    loss_of(module, data(0)).backward()
    optimizer.step(1e-2)
    assert "0.weight" not in optimizer.masters
    assert torch.equal(module[0].weight, frozen)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        MasterAdamW(module, 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_saved_state_goes_on_bitwise(tmp_path, dtype, steps_before):
    def advance(module, optimizer, steps):
        for step in steps:
            loss_of(module, data(step)).backward()
            loss_of(module, data(step + 100)).backward()
            optimizer.step(1e-2)

    module = make_module(dtype)
    optimizer = MasterAdamW(module, 1e-2, BETAS, 0.1)
    advance(module, optimizer, range(steps_before))
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"optimizer": optimizer.state_dict()})
    at_save = tensors_of(module, optimizer)
    advance(module, optimizer, range(steps_before, steps_before + 3))

    resumed = make_module(dtype)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.add_(1.0)
    again = MasterAdamW(resumed, 1e-2, BETAS, 0.1)
    advance(resumed, again, range(50, 52))  # whatever was there is replaced
    loss_of(resumed, data(60)).backward()  # and gradients in waiting are dropped
    again.load_state_dict(folder.load(1)["optimizer"])
    assert_same(tensors_of(resumed, again), at_save)
    advance(resumed, again, range(steps_before, steps_before + 3))
    assert_same(tensors_of(resumed, again), tensors_of(module, optimizer))


def test_the_state_of_another_module_is_refused():
    optimizer = MasterAdamW(make_module(), 1e-3)
    state = MasterAdamW(nn.Linear(8, 8), 1e-3).state_dict()
    with pytest.raises(ConfigError, match="another model"):
        optimizer.load_state_dict(state)


@pytest.mark.slow
def test_a_second_optimizer_of_a_module_after_the_first():
    module = make_module(torch.bfloat16)
    first = MasterAdamW(module, 1e-2)
    loss_of(module, data(0)).backward()
    first.step(1e-2)
    del first
    gc.collect()
    second = MasterAdamW(module, 1e-2)
    before = module[1].weight.clone()
    loss_of(module, data(1)).backward()
    assert second.step(1e-2).applied
    assert not torch.equal(module[1].weight, before)


def stepped(team, module):
    """Parameters and state of a copy of the module after two steps, in which every shard has other data."""
    module = copy.deepcopy(module)
    optimizer = MasterAdamW(module, lr=0.01, team=team)
    for step in (0, 1):
        for shard in own_shards(team):
            loss_of(module, data(2 * step + shard)).backward()
            optimizer.end_shard()
        optimizer.step(0.01)
    return tensors_of(module, optimizer)[0]


def test_every_rank_has_the_new_parameters():
    module = make_module(torch.bfloat16)  # outside of the threads, which share the global random generator
    expected = stepped(Team(2), module)
    for found in on_ranks(2, 2, lambda team: stepped(team, module)):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan])
def test_a_norm_that_cannot_be_is_refused(norm):
    with pytest.raises(ConfigError, match="max_grad_norm"):
        MasterAdamW(nn.Linear(1, 1), 1e-3, max_grad_norm=norm)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_on_a_gpu(tmp_path):
    module = make_module(torch.bfloat16).cuda()
    optimizer = MasterAdamW(module, 1e-2)
    for step in range(3):
        loss_of(module, data(step).cuda()).backward()
        assert optimizer.step(1e-2).applied
    CheckpointFolder(tmp_path).save(1, optimizer.state_dict())
    resumed = make_module(torch.bfloat16).cuda()
    again = MasterAdamW(resumed, 1e-2)
    again.load_state_dict(CheckpointFolder(tmp_path).load(1))
    for one, other in ((module, optimizer), (resumed, again)):
        loss_of(one, data(9).cuda()).backward()
        other.step(1e-2)
    assert_same(tensors_of(module, optimizer), tensors_of(resumed, again))


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
