"""The memory of one rank: shards, sharded weights and rollouts, against the objects that are really made."""

import sys
from dataclasses import replace

import pytest
import torch

from covey.config import (
    ClusterConfig,
    CriticConfig,
    LoRAConfig,
    ReferenceConfig,
    RunConfig,
    SamplingConfig,
    UpdateConfig,
)
from covey.data import Batch, Team
from covey.experiment.plan import must_shard
from covey.llm.memory import MemoryPlan, adapter_parameters, largest_microbatch, microbatches_of_shard, predict
from covey.llm.policy import LanguagePolicy
from covey.runtime.distributed import GradientTree, shard_rows
from covey.runtime.optimizer import MasterAdamW, fits_replicated, replica_bytes
from covey_cluster.rank_memory import (
    predict_sharded,
    rollout_bytes,
    units_of,
    without_sampling,
)
from helpers.memory_models import SMOLLM2, batch_of, sized_model

CONFIG = RunConfig(precision="bf16", device="cuda")
EXACT = {"ranks": 4, "width": 2, "device": "cuda", "is_exact": True}


def run_of(prompts: int, group_size: int, new_tokens: int, microbatch_tokens: int, shards: int = 0) -> RunConfig:
    return replace(
        CONFIG,
        sampling=SamplingConfig(prompts_per_step=prompts, group_size=group_size, max_new_tokens=new_tokens),
        update=UpdateConfig(microbatch_tokens=microbatch_tokens),
        cluster=ClusterConfig(shards=shards),
    )


@pytest.mark.parametrize("kind", ["llama", "llama untied"])
def test_the_units_are_those_of_the_model(kind: str) -> None:
    model, size = sized_model(kind)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert units_of(size) == (layer, sum(parameter.numel() for parameter in model.parameters()) - 3 * layer)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_the_copies_of_the_gradients_of_shards(shards: int) -> None:
    """Those that the tree holds while the next shard is computed, at the most."""
    tree, held = GradientTree(), [0]
    for shard in range(shards):
        held.append(len(tree._sums))
        if shards > 1:
            tree.add([torch.tensor([float(shard)])])
    assert GradientTree.copies(shards) == max(held)
    config = replace(CONFIG, cluster=ClusterConfig(shards=shards))
    parts = predict(SMOLLM2, config, device="cuda", width=2).parts
    assert parts["gradients of shards"] == max(held) * 4 * SMOLLM2.parameters
    assert parts["gradients"] == 4 * SMOLLM2.parameters
    with_critic = predict(SMOLLM2, replace(config, algorithm="ppo"), device="cuda", width=2).parts
    assert with_critic["gradients of shards"] == max(held) * with_critic["critic's gradients"]


@pytest.mark.parametrize("shards", [2, 4])
def test_an_optimizer_holds_as_many_copies(shards: int) -> None:
    module = torch.nn.Linear(7, 5, bias=False).to(torch.bfloat16)
    optimizer = MasterAdamW(module, lr=1e-3, team=Team(shards))
    most = 0
    for _ in range(shards):
        module(torch.ones(2, 7, dtype=torch.bfloat16)).sum().backward()
        held = [tensor for _, sums in optimizer._shards._sums for tensor in sums]
        gradients = [master.grad for master in optimizer.masters.values() if master.grad is not None]
        most = max(most, sum(tensor.nbytes for tensor in [*held, *gradients]))
        optimizer.end_shard()
    optimizer.step(1e-3)
    assert most == (1 + GradientTree.copies(shards)) * 4 * 35


@pytest.mark.parametrize(("shards", "ranks"), [(0, 1), (2, 1), (2, 2), (4, 2), (0, 4)])
def test_microbatches_are_those_of_the_largest_shard(shards: int, ranks: int) -> None:
    prompts, group_size, prompt_tokens, new_tokens = 7, 4, 19, 10
    model, _ = sized_model("llama")
    policy = LanguagePolicy(model, microbatch_tokens=64)
    batch = batch_of(prompts, group_size, prompt_tokens, new_tokens)
    pieces = [
        [rows[piece] for piece in policy.microbatches(batch.select(rows))]
        for rows in shard_rows(batch, shards or ranks)
    ]
    config = run_of(prompts, group_size, new_tokens, 64, shards)
    predicted = microbatches_of_shard(config, prompt_tokens, ranks)
    largest = max(pieces, key=lambda one: sum(map(len, one)))
    assert sorted(predicted) == sorted((len(batch.group_B[rows].unique()), len(rows)) for rows in largest)
    assert largest_microbatch(config, prompt_tokens, ranks) == max(predicted, key=lambda one: one[0] * 19 + one[1] * 10)


def test_ranks_divide_the_prompts_of_sampling() -> None:
    def cache(ranks: int) -> int:
        plan = predict(SMOLLM2, run_of(8, 4, 32, 4096), device="cpu", width=2, prompt_tokens=0, ranks=ranks)
        return plan.parts["keys and values"]

    assert cache(1) == 4 * cache(4) == 8 * cache(8)


def test_sharded_weights_are_divided_and_gathered() -> None:
    whole = predict(SMOLLM2, CONFIG, ranks=4, device="cuda", width=2).parts
    parts = predict_sharded(SMOLLM2, CONFIG, **EXACT).parts
    n = SMOLLM2.parameters
    divided = ("fp32 master weights", "optimizer moments", "gradients", "reference")
    assert [parts[name] for name in divided] == [-(-whole[name] // 4) for name in divided] == [n, 2 * n, n, n // 2]
    assert parts["weights"] == 0, "the masters are the weights"
    assert parts["gathered weights"] == 2 * n
    units = units_of(SMOLLM2)
    assert parts["gathered layers"] == 2 * (2 * units.layer + units.root)
    assert parts["gradients of shards"] == 4 * n
    assert parts["activations"] == whole["activations"]
    loose = predict_sharded(SMOLLM2, CONFIG, **EXACT | {"is_exact": False}).parts
    assert loose["gradients of shards"] == 4 * (2 * units.layer + units.root)
    two = predict_sharded(SMOLLM2, replace(CONFIG, cluster=ClusterConfig(shards=8)), **EXACT).parts
    assert two["gradients of shards"] == 2 * 4 * n
    single = predict_sharded(SMOLLM2, CONFIG, **EXACT | {"width": 4}).parts
    assert [single[name] for name in ("weights", "fp32 master weights", "gathered weights")] == [n, 0, 4 * n]


def test_a_critic_is_sharded_too() -> None:
    ppo = replace(CONFIG, algorithm="ppo")
    whole = predict(SMOLLM2, ppo, ranks=4, device="cuda", width=2).parts
    parts = predict_sharded(SMOLLM2, ppo, **EXACT).parts
    for name in ("critic's master weights", "critic's moments", "critic's gradients"):
        assert parts[name] == -(-whole[name] // 4)
    assert parts["critic's weights"] == 0


@pytest.mark.parametrize("width", [2, 4])
def test_with_an_adapter_the_frozen_weights_are_divided(width: int) -> None:
    ppo = replace(CONFIG, algorithm="ppo", lora=LoRAConfig(rank=16), critic=CriticConfig(trunk="adapter"))
    ppo = replace(ppo, reference=ReferenceConfig(refresh_every=2), cluster=ClusterConfig(shards=8))
    whole = predict(SMOLLM2, ppo, ranks=4, device="cuda", width=width).parts
    for is_exact in (True, False):
        given = EXACT | {"width": width, "is_exact": is_exact}
        parts = predict_sharded(SMOLLM2, ppo, **given).parts
        n, units = SMOLLM2.parameters, units_of(SMOLLM2)
        changed = {"weights", "gathered weights", "gathered layers"}
        assert [parts["weights"], parts["gathered weights"]] == [-(-width * n // 4), width * n]
        assert parts["gathered layers"] == width * (2 * units.layer + units.root)
        assert all(parts[name] == whole[name] for name in whole.keys() - changed)
        assert parts["reference"] == parts["adapter"] > 0
        assert parts["gradients of shards"] == parts["critic's gradients"] > 0


def test_the_smallest_of_all_weights_and_an_adapter_that_needs_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 bytes of a frozen weight, and 18 of a number that is trained."""
    config = RunConfig(model="smollm2-135m", precision="bf16", device="cpu")
    adapted = replace(config, lora=LoRAConfig(rank=16))
    adapter = adapter_parameters(SMOLLM2, adapted)
    needed = {config: 20 * SMOLLM2.parameters, adapted: 2 * SMOLLM2.parameters + 18 * adapter}
    for one, size in needed.items():
        for memory, must in ((int(size / 0.69), False), (int(size / 0.71), True)):
            monkeypatch.setattr("covey.experiment.plan.memory_bytes", lambda memory=memory: memory)
            assert must_shard(one, Team()) is must


def test_gathered_weights_and_gathered_layers_are_not_there_together() -> None:
    plan = predict_sharded(SMOLLM2, CONFIG, **EXACT)
    parts = dict.fromkeys(plan.parts, 0)
    assert MemoryPlan(parts | {"gathered weights": 7, "gathered layers": 5, "weights": 1}).peak == 8
    outside = without_sampling(plan)
    assert outside.peak < plan.peak or outside.parts["gathered weights"] == 0
    assert not any(outside.parts[name] for name in ("gathered weights", "keys and values", "logits of a decoding step"))
    assert outside.parts["activations"] == plan.parts["activations"]


def test_the_rollouts_of_a_step() -> None:
    """Lists as the generator makes them, and the batch with what `prepare_batch` adds to it."""
    config = run_of(3, 2, 50, 4096)
    actions, logprobs = (torch.arange(1000, 1050)).tolist(), (torch.rand(50).double() - 1).tolist()
    of_lists = sum(sys.getsizeof(one) + 8 for one in actions) + sum(sys.getsizeof(one) + 8 for one in logprobs)
    batch = batch_of(3, 2, 10, 50)
    float_BT = torch.zeros(6, 50)
    names = ("advantages_BT", "reference_logprobs_BT", "proximal_logprobs_BT", "loss_weights_BT")
    batch = replace(batch, **dict.fromkeys(names, float_BT))

    def of_batch(batch: Batch) -> int:
        fields = [getattr(batch, name) for name in batch.__slots__]
        return sum(one.nbytes for one in fields if isinstance(one, torch.Tensor) and one.dim() == 2)

    # A small integer of Python takes 28 bytes, which its allocator rounds to 32.
    assert rollout_bytes(config) == pytest.approx(6 * of_lists + of_batch(batch), rel=0.05)
    with_critic = replace(batch, values_BT=float_BT, returns_BT=float_BT)
    ppo = replace(config, algorithm="ppo")
    assert rollout_bytes(ppo) - rollout_bytes(config) == of_batch(with_critic) - of_batch(batch)


def test_whole_weights_up_to_seven_tenths_of_a_device() -> None:
    assert replica_bytes(100, 100, 2) == 100 * (2 + 4 + 8 + 4) + 100 * 2
    assert replica_bytes(100, 10, 4) == 110 * 4 + 100 * (8 + 4)
    assert replica_bytes(100, 10, 2, shards=4) == replica_bytes(100, 10, 2) + 2 * 400  # two sums of the tree
    assert fits_replicated(100, 100, 2, 1, 2858)
    assert not fits_replicated(100, 100, 2, 1, 2857)
    assert not fits_replicated(100, 100, 2, 2, 2858)
    billion = 10**9
    assert fits_replicated(28 * billion // 10, 28 * billion // 10, 2, 1, 80 * billion)
    assert not fits_replicated(7 * billion, 7 * billion, 2, 1, 80 * billion)
