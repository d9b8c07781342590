"""The GPU's path: whole runs on a fake one, which mixes no devices and gives the numbers of a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from covey.llm.generation.trial import in_fp32
from covey.llm.model.recompute import decoder_layers
from covey.runtime.fsdp import ShardedWeights
from covey.runtime.optimizer import norm_of, row_squares
from helpers.fake_gpu import GPU, Computing
from helpers.run_helpers import reproducible_metrics, write_recipe
from helpers.thread_team import ThreadTeam, on_ranks
from helpers.tiny_models import tiny_folder, tiny_model

TESTS = Path(__file__).parent.parent
FOUND = os.pathsep.join([str(TESTS), *sys.path])  # by another process, as by this one
PPO = 'algorithm = "ppo"\n'


def steps_of(folder: Path, recipe: Path, program: str) -> list[dict[str, float]]:
    """What a run of three steps measured, without covey's kernels."""
    words = "train", recipe, "--run-dir", folder / program
    done = subprocess.run(
        [sys.executable, "-m", program, *map(str, words)],
        env=os.environ | {"PYTHONPATH": FOUND, "COVEY_NATIVE": "0"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    steps = reproducible_metrics(folder / program)
    assert len(steps) == 3
    return steps


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        pytest.param("llama", "", marks=pytest.mark.slow),
        pytest.param("qwen3", PPO, marks=pytest.mark.slow),
        pytest.param("gpt2", "", marks=pytest.mark.slow),
        pytest.param("bloom", "", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_a_fake_gpu_has_the_numbers_of_a_cpu(tmp_path, kind, algorithm):
    recipe = write_recipe(tmp_path, tiny_folder(tmp_path / "model", kind), steps=3)
    recipe.write_text(algorithm + recipe.read_text())
    on_cpu, on_gpu = (steps_of(tmp_path, recipe, program) for program in ("covey.cli.main", "helpers.fake_gpu"))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)
    # A decoder that mixes devices fails its trial, and a slower one would take its place without a word.
    machine = json.loads((tmp_path / "helpers.fake_gpu" / "origin.json").read_text())["environment"]
    assert machine["sampling"] == ("padded cache" if kind == "bloom" else "shared prefix")


@pytest.mark.slow
def test_a_run_in_bf16_on_a_fake_gpu(tmp_path):
    """Roundings of the two devices' layers differ, so that other tokens are sampled: it must go through."""
    recipe = write_recipe(tmp_path, tiny_folder(tmp_path / "model"), steps=3)
    recipe.write_text(recipe.read_text().replace('"fp32"', '"bf16"'))
    for step in steps_of(tmp_path, recipe, "helpers.fake_gpu"):
        assert 0 < step["grad_norm"] < 100


@pytest.mark.slow
def test_a_fake_gpu_refuses_what_a_gpu_refuses():
    script = """
import torch
from helpers.fake_gpu import GPU, Computing, Sending

def refused(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)

with Computing(), Sending():
    here, there = torch.ones(3), torch.ones(3, device=GPU)
    print(refused(lambda: here + there), refused(lambda: (there * 2.0 + there[torch.tensor([0])]).cpu()))
    print((there + here.to(GPU)).tolist(), (there * there.sum().item()).cpu().tolist())
"""
    told = subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, check=True)
    refusals, sums = told.stdout.splitlines()
    assert refusals == "aten::add.Tensor: all tensors are expected on one device None"
    assert sums == "[2.0, 2.0, 2.0] [3.0, 3.0, 3.0]"


def test_squares_of_divided_rows_come_back_to_their_device():
    """The norm joins them with those of whole parameters, such as the value head of PPO's critic."""

    def norm(team: ThreadTeam) -> Tensor:
        weights = ShardedWeights(nn.Identity(), torch.float32, team, exact=True)
        with Computing():
            own, head = (row_squares(torch.ones(3 - team.rank, 2, device=GPU), 6) for _ in range(2))
            return norm_of([head, *weights.whole_rows([own], [5])])

    assert [found.device for found in on_ranks(2, 2, norm)] == [GPU, GPU]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_the_trial_of_a_model_has_one_layer_in_fp32_at_a_time(kind, monkeypatch):
    """All layers of a model of 7B in fp32 do not fit on the GPUs on which it is trained with LoRA."""
    module, exact = tiny_model(kind, dtype=torch.bfloat16), tiny_model(kind, dtype=torch.bfloat16).float()
    tokens, seen = torch.arange(5, 30)[None], []
    layers = decoder_layers(module)

    def dtypes(*_: object) -> None:
        seen.append(sum(parameter.dtype == torch.float32 for layer in layers for parameter in layer.parameters()))

    with monkeypatch.context() as patched:
        patched.setattr(type(module), "device", property(lambda _: torch.device("cuda")))
        context = in_fp32(module)
        context.__enter__()
    for layer in layers:
        layer.register_forward_pre_hook(dtypes)
    with torch.no_grad():
        assert torch.equal(module(input_ids=tokens).logits, exact(input_ids=tokens).logits)
    context.__exit__(None, None, None)
    assert seen == [len(list(layer.parameters())) for layer in layers]
    right = tiny_model(kind, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, right[name]) for name, tensor in module.state_dict().items())


@pytest.mark.slow
@pytest.mark.alone
def test_the_session_on_a_borrowed_gpu_measures_every_stage(tmp_path):
    """In tiny shapes on the CPU; without TRL, and `flex` has no backward pass on a CPU."""
    script, out = Path(__file__).parents[2] / "benchmarks" / "gpu_session.py", tmp_path / "results.jsonl"
    stages = ["probe", "agree", "sample", "update", "memory"]
    command = [sys.executable, script, out, "--tiny", "--seconds", "500", "--stages", ",".join(stages)]
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["stage"] for line in lines if line.get("ended") == "exit 0"] == stages
    assert [line for line in lines if "failed" in line or "skipped" in line] == []
    assert {"tiny, kernels", "tiny, torch", "tiny, plain transformers"} <= {line.get("what") for line in lines}
