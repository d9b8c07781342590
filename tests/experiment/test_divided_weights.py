"""Adapters on frozen weights that the ranks divide (FSDP2): the bits of whole weights, on every rank."""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from covey.config import ConfigError, LoRAConfig, RunConfig
from covey.data import Team
from covey.experiment.models import adapt, check_same_weights
from covey.llm.model.lora import BASE_FILE, base_of
from covey.llm.policy import LanguagePolicy
from covey.runtime.distributed import ShardedTeam, is_sharded
from helpers import sharded_adapters
from helpers.rank_cases import start_ranks
from helpers.rank_runs import finish
from helpers.sharded_adapters import CONFIG, REFRESHED, SHARDS, build, found, frozen_numbers
from helpers.thread_team import ThreadTeam, on_ranks
from helpers.tiny_models import tiny_model


@pytest.fixture
def one_rank() -> Iterator[ShardedTeam]:
    """A team of this process alone, whose weights FSDP2 divides into one part."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ShardedTeam(SHARDS)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("config", "kind", "dtype"), [(CONFIG, "llama", "bfloat16"), (REFRESHED, "gpt2", "float32")], ids=["plain", "gpt2"]
)
def test_policy_reference_and_critic_compute_as_with_whole_weights(
    one_rank: ShardedTeam, tmp_path: Path, config: RunConfig, kind: str, dtype: str
) -> None:
    alone = Team(SHARDS)
    expected = found(build(alone, config, kind, dtype), alone, tmp_path / "whole")
    models = build(one_rank, config, kind, dtype)
    assert found(models, one_rank, tmp_path / "sharded") == expected
    assert expected["policy"] != expected["reference"]
    assert expected["after: values"] != expected["values"]
    assert not models.in_parts
    module = models.policy.module
    assert all(is_sharded(one) for name, one in module.named_parameters() if "lora_" not in name)
    weights = models.reference.weights
    with weights.gathered():
        assert not any(is_sharded(one) for one in module.parameters())
    assert not any(is_sharded(one) for one in weights.state_dict(module).values())
    texts = [(tmp_path / name / "critic" / BASE_FILE).read_text() for name in ("whole", "sharded")]
    assert texts[0] == texts[1], "the checksum is that of whole weights"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapter"])
@pytest.mark.parametrize("other", [None, 0, 2])
def test_ranks_that_have_loaded_other_weights_are_refused(rank: int, other: int | None) -> None:
    config = RunConfig(model="mine", lora=LoRAConfig(rank))
    loaded = [adapt(LanguagePolicy(tiny_model("llama", dtype=torch.bfloat16)), config) for _ in range(3)]
    if other is not None:
        module = loaded[other][0].module.get_submodule("model.layers.1.mlp.down_proj")
        base_of(module).weight.data[0, 0] += 0.5

    def compare(team: ThreadTeam) -> str:
        try:
            policy, adaptation = loaded[team.rank]
            check_same_weights(partial(adaptation.checksum, policy), config.model, team)
        except ConfigError as error:
            return str(error)
        return ""

    line = {0: "rank 1 has", 2: "rank 2 has"}.get(other, "")  # type: ignore[arg-type]
    for found_line in on_ranks(3, 3, compare):
        assert found_line.startswith(line)
        assert bool(found_line) == (other is not None)


@pytest.mark.slow
@pytest.mark.alone
def test_two_ranks_have_half_of_the_frozen_weights_and_the_bits_of_one(tmp_path: Path) -> None:
    kind, dtype = "llama", "bfloat16"
    words = [sharded_adapters.__file__, str(tmp_path), kind, dtype]
    finish(start_ranks(words, 2, tmp_path, PYTHONPATH=os.pathsep.join(sys.path)))
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for name, config in (("plain", CONFIG), ("refreshed", REFRESHED)):
        alone = Team(SHARDS)
        models = build(alone, config, kind, dtype)
        _, whole = frozen_numbers(models)
        expected = found(models, alone, tmp_path / f"whole-{name}")
        parts = [rank[name]["frozen"][0] for rank in ranks]
        assert sum(parts) == whole
        assert max(parts) < 0.51 * whole
        assert ranks[0][name]["found"] == expected
        assert ranks[1][name]["found"].items() < expected.items()
        assert ranks[1][name]["found"]["after: policy"] != expected["policy"]
