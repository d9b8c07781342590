"""Runs on a real GPU: the numbers of a CPU, the same bits twice, and the parts of a model that a GPU computes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import covey
from covey.config import RunConfig
from covey.runtime import optimizer
from helpers.rank_cases import CASES, CONVERSATIONS, case
from helpers.run_helpers import reproducible_metrics
from helpers.sampled_runs import files_of
from helpers.tiny_models import SHAPES, calling_folder, tiny_folder

pytestmark = pytest.mark.gpu
# Of the first step. Later ones differ by more, because the optimizer divides small gradients by small moments.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in SHAPES:
        tiny_folder(folder / kind, kind)
    calling_folder(folder / "calling")
    return folder


def trained(config: RunConfig, model: Path, run_dir: Path, device: str) -> list[dict[str, Any]]:
    evaluation = replace(config.evaluation, problems=20, every=3)
    covey.run(replace(config, evaluation=evaluation, model=str(model), device=device, run_dir=str(run_dir)))
    return reproducible_metrics(run_dir)


def assert_numbers_of_a_cpu(on_gpu: list[dict[str, Any]], on_cpu: list[dict[str, Any]]) -> None:
    assert len(on_gpu) == len(on_cpu)
    assert on_gpu[0].keys() == on_cpu[0].keys()
    for name, value in on_cpu[0].items():
        assert on_gpu[0][name] == pytest.approx(value, rel=TOLERANCE, abs=1e-4, nan_ok=True), name
    assert all(math.isfinite(value) for step in on_gpu for value in step.values() if value is not None)


@pytest.mark.parametrize("name", CASES)
def test_a_run_on_a_gpu_has_the_numbers_of_a_cpu_and_the_same_bits_twice(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 the devices round otherwise, so that other tokens are drawn: then two runs on a GPU are compared."""
    monkeypatch.setenv("COVEY_NATIVE", "0")
    monkeypatch.setattr(optimizer, "FEWEST_NUMBERS", 100)  # small matrices have moments in 8 bits too
    monkeypatch.setattr(optimizer, "SHORTEST_BLOCK", 8)
    model = models / ("calling" if name in CONVERSATIONS else "llama")
    on_gpu = trained(CASES[name], model, tmp_path / "gpu", "cuda")
    assert torch.cuda.max_memory_allocated() > 0
    trained(CASES[name], model, tmp_path / "again", "cuda")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "gpu")
    if CASES[name].precision == "fp32":
        assert_numbers_of_a_cpu(on_gpu, trained(CASES[name], model, tmp_path / "cpu", "cpu"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", SHAPES)
def test_every_kind_of_model(kind: str, precision: str, models: Path, tmp_path: Path) -> None:
    config = case(precision=precision, loss={"kl_coefficient": 0.1})
    on_gpu = trained(config, models / kind, tmp_path / "gpu", "cuda")
    trained(config, models / kind, tmp_path / "again", "cuda")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "gpu")
    if precision == "fp32":
        assert_numbers_of_a_cpu(on_gpu, trained(config, models / kind, tmp_path / "cpu", "cpu"))
