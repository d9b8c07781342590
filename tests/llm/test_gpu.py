"""The GPU's path: whole runs on a fake one, which mixes no devices and gives the numbers of a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from covey.algorithms import ppo
from covey.core.calibration import auc, reliability
from covey.core.covariance import covariance
from covey.data import Batch
from covey.functional import with_loss_weights
from covey.llm.generation.token_sampling import Truncation, sample_tokens, uniforms_on
from covey.llm.generation.trial import in_fp32
from covey.llm.model.recompute import decoder_layers
from covey.llm.native.bindings import TORCH_ALONE
from covey.runtime.fsdp import ShardedWeights
from covey.runtime.optimizer import norm_of, row_squares
from helpers.fake_gpu import GPU, Computing, Sending
from helpers.run_helpers import reproducible_metrics, write_recipe
from helpers.thread_team import ThreadTeam, on_ranks
from helpers.tiny_models import tiny_folder, tiny_model

TESTS = Path(__file__).parent.parent
FOUND = os.pathsep.join([str(TESTS), *sys.path])  # by another process, as by this one
PPO = "--algorithm ppo"
LORA = "--lora.rank 2 --update.eight_bit_moments true --loss.clip_cov_fraction 0.2"


def steps_of(
    folder: Path, recipe: Path, program: str, options: str = "", command: str = "train"
) -> list[dict[str, float]]:
    """What the steps of a run measured, without covey's kernels."""
    device = "mps" if program == "helpers.fake_gpu" else "cpu"
    words = command, recipe, "--run-dir", folder / program, "--device", device, *options.split()
    done = subprocess.run(
        [sys.executable, "-m", program, *" ".join(map(str, words)).split()],
        env=os.environ | {"PYTHONPATH": FOUND, "COVEY_NATIVE": "0"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return reproducible_metrics(folder / program)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("llama", "", marks=pytest.mark.slow),
        pytest.param("qwen3", PPO, marks=pytest.mark.slow),
        pytest.param("gpt2", "", marks=pytest.mark.slow),
        pytest.param("bloom", "", marks=pytest.mark.slow),
        pytest.param("llama", LORA, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_a_fake_gpu_has_the_numbers_of_a_cpu(tmp_path, kind, options):
    recipe = write_recipe(tmp_path, tiny_folder(tmp_path / "model", kind), steps=3)
    programs = "covey.cli.main", "helpers.fake_gpu"
    on_cpu, on_gpu = (steps_of(tmp_path, recipe, program, options) for program in programs)
    assert_alike(on_cpu, on_gpu, 3)
    # A decoder that mixes devices fails its trial, and a slower one would take its place without a word.
    machine = json.loads((tmp_path / "helpers.fake_gpu" / "origin.json").read_text())["environment"]
    assert machine["sampling"] == ("padded cache" if kind == "bloom" else "shared prefix")


def assert_alike(on_cpu: list[dict[str, float]], on_gpu: list[dict[str, float]], steps: int) -> None:
    assert len(on_cpu) == len(on_gpu) == steps
    for one, other in zip(on_cpu, on_gpu, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.slow
def test_training_on_examples_on_a_fake_gpu_has_the_numbers_of_a_cpu(tmp_path):
    pairs = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": str(n)} for n in range(40)]
    examples = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    for name, rows in (("pairs", pairs), ("examples", examples)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = write_recipe(tmp_path, tiny_folder(tmp_path / "model"))
    sft = f"--sft.data {tmp_path}/examples.jsonl --sft.batch_size 18"
    rewards = f"--model {tmp_path}/model --precision fp32 --batch-size 18"
    for command, given, options in (("sft", recipe, sft), ("reward-model train", tmp_path / "pairs.jsonl", rewards)):
        folder = tmp_path / command.replace(" ", "-")
        folder.mkdir()
        programs = "covey.cli.main", "helpers.fake_gpu"
        assert_alike(*(steps_of(folder, given, program, options, command) for program in programs), 2)


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
    except (RuntimeError, TypeError) as error:
        return str(error)

with Computing(), Sending():
    here, there = torch.ones(3), torch.ones(3, device=GPU)
    print(refused(lambda: here + there), refused(lambda: (there * 2.0 + there[torch.tensor([0])]).cpu()))
    print(refused(lambda: there.double()), refused(lambda: here.double().to(GPU)), there.device)
    print((there + here.to(GPU)).tolist(), (there * there.sum().item()).cpu().tolist())
"""
    told = subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, check=True)
    mixed, wide, sums = told.stdout.splitlines()
    assert mixed == "aten::add.Tensor: all tensors are expected on one device None"
    assert wide == 2 * "mps:0 has no float64 " + "mps:0"
    assert sums == "[2.0, 2.0, 2.0] [3.0, 3.0, 3.0]"


def test_squares_of_divided_rows_come_back_to_their_device():
    """The norm joins them with those of whole parameters, such as the value head of PPO's critic."""

    def norm(team: ThreadTeam) -> torch.device:
        weights = ShardedWeights(nn.Identity(), torch.float32, team, exact=True)
        with Computing(), Sending():
            own, head = (row_squares(torch.ones(3 - team.rank, 2, device=GPU), 6) for _ in range(2))
            return norm_of([head, *weights.whole_rows([own], [5])]).device

    assert on_ranks(2, 2, norm) == [GPU, GPU]


LOGPROBS = torch.linspace(-3, 0, 8).view(2, 4)
LOGITS = torch.linspace(-2, 2, 600).sin().repeat(3, 1)
LOGITS[:, 500:] = -torch.inf  # in a block of their own, the last
SUMS = {
    "squares": lambda to: row_squares(to(LOGPROBS), 8),
    "squares of a large tensor": lambda to: row_squares(to(LOGITS[:, :512]), 1 << 40),
    "draws": lambda to: sample_tokens(to(LOGITS), uniforms_on(to(LOGITS).device, UNIFORMS), 0.7, TORCH_ALONE)[0],
    "nucleus": lambda to: Truncation(top_k=9, top_p=0.9).apply(to(LOGITS), to(UNIT), to(UNIT), 0.7).isinf(),
    "covariance": lambda to: covariance(to(LOGPROBS), to(LOGPROBS.flip(0)), to(LOGPROBS < -0.5)),
    "area": lambda to: torch.tensor(auc(to(LOGPROBS.view(-1)), to(LOGPROBS.view(-1).sin() < -0.5))),
    "diagram": lambda to: reliability(to(LOGPROBS.view(-1).exp()), to(LOGPROBS.view(-1) < -1)).observed_K,
    "weights": lambda to: with_loss_weights(ppo(), blank(to(LOGPROBS))).loss_weights_BT,
}
UNIFORMS, UNIT = np.array([0.0, 0.5, 1.0 - 2.0**-53]), torch.ones(1, dtype=torch.int64)


def blank(advantages_BT: Tensor) -> Batch:
    return Batch.blank(advantages_BT < 0, advantages_BT=advantages_BT)


@pytest.mark.parametrize("name", SUMS)
def test_sums_on_a_device_without_fp64_are_those_of_a_cpu(name):
    here = SUMS[name](lambda tensor: tensor)
    with Computing(), Sending():
        there = SUMS[name](lambda tensor: tensor.to(GPU)).cpu()
    torch.testing.assert_close(there.double(), here.double(), rtol=1e-5, atol=1e-6)


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
