"""Seconds of communication and speeds of trainer and server, by hand; the tables of docs/planning.md."""

import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from covey.config import ClusterConfig, ConfigError, CriticConfig, LoRAConfig, RunConfig, UpdateConfig
from covey.experiment.plan import Place
from covey.llm.memory import SMOLLM2_135M, adapter_parameters, microbatches_of_shard, read_dimensions
from covey_cluster.communication import Passes, Traffic, sharded_traffic, whole_weights_traffic
from covey_cluster.rank_report import REPLICATED, SHARDED, RankPlanner, plan_ranks
from covey_cluster.report import DevicesConfig, SimulationConfig
from covey_cluster.throughput import (
    TrainerSpeed,
    computing_seconds,
    evaluations_of_a_token,
    passes_of_a_token,
    plan_server,
)

BILLION = 10**9
DEVICES = DevicesConfig(node_link=100.0, network_link=10.0, weights_link=4.0, device_tflops=1000.0, flops_use=0.5)
PASSES = Passes(optimizer_steps=2, microbatches=3, evaluations=5)
SIZE = read_dimensions(SMOLLM2_135M)
SERVED = SimulationConfig(mean_tokens=100, memory_bandwidth=1000.0, bandwidth_use=0.5)


@pytest.mark.parametrize(("ranks", "link", "sent"), [(1, 100, 0), (4, 100, 3 / 4), (8, 100, 7 / 8), (16, 10, 15 / 16)])
def test_traffic_of_a_billion_weights(ranks: int, link: float, sent: float) -> None:
    """In GB: a gather 2, a reduction 4. Gradients of whole weights are reduced and then gathered in fp32."""
    given = BILLION, 2, PASSES, DEVICES, ranks
    whole = whole_weights_traffic(*given)
    assert astuple(whole) == pytest.approx((2 * 2 * 4 * sent / link, 0.0, 2 / 4))
    gathers = (2 * 2 * 3 + 5) * 2 * sent / link
    exact = sharded_traffic(*given, is_exact=True)
    assert astuple(exact) == pytest.approx((2 * 4 * sent / link, gathers, 0.5))
    loose = sharded_traffic(*given, is_exact=False)
    assert astuple(loose) == pytest.approx((0.0, gathers + 2 * 3 * 4 * sent / link, 0.5))


def test_the_traffic_of_an_adapter_on_frozen_weights() -> None:
    """Gradients of the adapters, and gathers of the frozen weights for the passes of policy and critic."""
    config = RunConfig(algorithm="ppo", lora=LoRAConfig(rank=16), critic=CriticConfig(trunk="adapter"))
    planner = RankPlanner(SIZE, config, DEVICES, Place("cuda", torch.bfloat16, 1 << 30), 64)
    assert planner.layouts == (REPLICATED, SHARDED)
    whole, sharded = (planner.traffic(layout, 4) for layout in planner.layouts)
    trained = 2 * adapter_parameters(SIZE, config) + 577
    assert whole.gradients == sharded.gradients == pytest.approx(2 * 4 * trained * 0.75 / 100e9)
    assert whole.weights == sharded.weights == pytest.approx(2 * SIZE.parameters / 4e9)
    microbatches = len(microbatches_of_shard(config, 64, 4))
    passes = 2 * microbatches + evaluations_of_a_token(config) * microbatches
    both = SIZE.parameters + SIZE.trunk_parameters
    assert [whole.during_passes, sharded.during_passes] == [0.0, pytest.approx(passes * 2 * both * 0.75 / 100e9)]
    fsdp = replace(config, cluster=ClusterConfig(weights="fsdp"))
    assert replace(planner, config=fsdp).chosen(4) == SHARDED
    assert planner.chosen(4) == REPLICATED
    small = replace(planner, place=Place("cuda", torch.bfloat16, 1 << 29))
    assert small.chosen(4) == SHARDED
    four_bits = replace(small, config=replace(config, lora=LoRAConfig(rank=16, load_in_4bit=True)))
    assert (four_bits.layouts, four_bits.chosen(4)) == ((REPLICATED,), REPLICATED)
    assert "every rank has all weights" in plan_ranks(four_bits, "a model", 4)


def test_gathers_overlap_with_computing_and_the_last_reduction_does_not() -> None:
    assert TrainerSpeed(10.0, Traffic(1.0, 4.0, 9.0)).seconds == 11.0
    assert TrainerSpeed(10.0, Traffic(1.0, 14.0, 9.0)).seconds == 15.0


def test_the_flops_of_a_token() -> None:
    config = RunConfig()
    assert passes_of_a_token(config) == 6 + 2
    assert passes_of_a_token(replace(config, update=UpdateConfig(recompute=True))) == 6 + 2 + 2
    several = replace(config, update=UpdateConfig(minibatches=2, epochs=3))
    assert passes_of_a_token(several) == 3 * 6 + 2 + 2, "with the old policy"
    assert computing_seconds(BILLION, 1000, config, DEVICES, 4) == pytest.approx(8e12 / (4 * 5e14))


def test_a_server_reads_weights_and_keys() -> None:
    weights, token = 2 * SIZE.parameters, 2 * 2 * 30 * 192
    server = plan_server(SIZE, 2, 500.0, 8 << 30, DEVICES, SERVED)
    assert (server.devices, server.slots) == (1, 128)
    assert server.speed.alone == pytest.approx(5e11 / (weights + 500 * token))
    assert server.speed.full == pytest.approx(128 * 5e11 / (weights + 128 * 500 * token))
    slow = plan_server(SIZE, 2, 500.0, 8 << 30, replace(DEVICES, device_tflops=0.01), SERVED)
    assert slow.speed.full == pytest.approx(0.01e12 * 0.5 / weights), "2 FLOPs a weight"


@pytest.mark.parametrize(("memory", "devices"), [(2 * 269, 1), (269, 2), (100, 8)])
def test_a_server_holds_the_weights_in_half_of_its_memory(memory: int, devices: int) -> None:
    size = replace(SIZE, parameters=134_500_000)
    assert plan_server(size, 2, 10.0, memory * 10**6, DEVICES, SERVED).devices == devices


def test_slots_that_fit() -> None:
    token = 2 * 2 * 30 * 192
    room = 2 * SIZE.parameters + 5.5 * 500 * token
    few = plan_server(SIZE, 2, 500.0, int(room / 0.9), DEVICES, replace(SERVED, devices_per_server=1))
    assert few.slots == 5
    with pytest.raises(ConfigError, match="cannot hold the weights and a completion: raise --devices-per-server"):
        plan_server(SIZE, 2, 500.0, 10**8, DEVICES, replace(SERVED, devices_per_server=1))


ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import cluster_tables

    yield cluster_tables
    sys.modules.pop("cluster_tables")


def in_docs(tables: object, name: str) -> list[str]:
    found = tables.block(name).search(TEXT)  # type: ignore[attr-defined]
    assert found is not None, f"docs/planning.md has no table {name}"
    return found[0].splitlines()


@pytest.mark.slow
def test_the_memory_table(tables: object) -> None:
    assert in_docs(tables, "memory") == tables.memory_table()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_row_of_the_simulated_table(tables: object) -> None:
    written = in_docs(tables, "simulated")
    assert tables.simulated_table(["0"]) == written[:3]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulated", "crashes"])
def test_the_simulated_tables(tables: object, name: str) -> None:
    assert in_docs(tables, name) == tables.TABLES[name]()  # type: ignore[attr-defined]
