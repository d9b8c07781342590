"""The GPU's path: whole runs on a pretended one, which mixes no devices and gives the numbers of a CPU; steps of
decoding that are recorded and replayed; and a real GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from covey.llm.decoding import SharedPrefixDecoder
from covey.llm.graphs import ROOM, GraphDecoder
from helpers.runs import reproducible_metrics, write_recipe
from helpers.tiny import SHARED, tiny_folder, tiny_model

TESTS = Path(__file__).parent.parent
FOUND = os.pathsep.join([str(TESTS), *sys.path])  # by another process, as by this one
PPO = 'algorithm = "ppo"\n'
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
        ("llama", ""),
        ("qwen3", PPO),
        pytest.param("gpt2", "", marks=pytest.mark.slow),
        pytest.param("bloom", "", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_a_pretended_gpu_has_the_numbers_of_a_cpu(tmp_path, kind, algorithm):
    recipe = write_recipe(tmp_path, tiny_folder(tmp_path / "model", kind), steps=3)
    recipe.write_text(algorithm + recipe.read_text())
    on_cpu, on_gpu = (steps_of(tmp_path, recipe, program) for program in ("covey.cli", "helpers.pretended_gpu"))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_run_in_bf16_on_a_pretended_gpu(tmp_path):
    """Roundings of the two devices' layers differ, so that other tokens are sampled: it must go through."""
    recipe = write_recipe(tmp_path, tiny_folder(tmp_path / "model"), steps=3)
    recipe.write_text(recipe.read_text().replace('"fp32"', '"bf16"'))
    for step in steps_of(tmp_path, recipe, "helpers.pretended_gpu"):
        assert 0 < step["grad_norm"] < 100


def test_a_pretended_gpu_refuses_what_a_gpu_refuses():
    script = """
import torch
from helpers.pretended_gpu import GPU, Computing, Sending, record

def refused(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)

with Computing(), Sending():
    here, there = torch.ones(3), torch.ones(3, device=GPU)
    print(refused(lambda: here + there), refused(lambda: (there * 2.0 + there[torch.tensor([0])]).cpu()))
    for step in (lambda: there + here.to(GPU), lambda: there * there.sum().item(), lambda: there + torch.ones(1)):
        print(refused(lambda: record(step)))
    replay = record(lambda: there * 2)
    before = replay().tolist()
    there.add_(1)
    print(before, replay().tolist())
"""
    told = subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, check=True)
    mixed, *recorded, replayed = told.stdout.splitlines()
    assert mixed == "aten::add.Tensor: all tensors are expected on one device None"
    assert all(line.endswith("a step that is recorded stays on the GPU") for line in recorded)
    assert len(recorded) == 3
    assert replayed == "[2.0, 2.0, 2.0] [4.0, 4.0, 4.0]"


@dataclass
class Alone:
    """A group that is decoded by itself."""

    decoder: SharedPrefixDecoder
    rows: int


def decode_both(module: PreTrainedModel, decoder: GraphDecoder) -> None:
    """Rows that leave, groups that follow, prompts and completions that outgrow their room: as each group alone."""
    random = np.random.default_rng(0)
    waiting = [random.integers(3, 80, size).tolist() for size in (3, 9, ROOM + 5, 2, 4, 7, 5, 8, 3)]
    groups: list[Alone] = []
    tokens = torch.empty(0, dtype=torch.int64, device=module.device)
    longest = 0
    for _ in range(3 * ROOM):
        logits, expected = [], []
        if groups:
            logits.append(decoder.step(tokens))
            pieces = tokens.split([group.rows for group in groups])
            expected = [group.decoder.step(piece) for group, piece in zip(groups, pieces, strict=True)]
        while waiting and decoder.room() >= 3:
            prompt = [waiting.pop(0)]
            groups.append(Alone(SharedPrefixDecoder(module, 3), 3))
            logits.append(decoder.add(prompt, 3).expand(3, -1))
            expected.append(groups[-1].decoder.add(prompt, 3).expand(3, -1))
        together = torch.cat(logits)
        torch.testing.assert_close(together, torch.cat(expected), atol=1e-4, rtol=0)
        tokens = together.argmax(dim=1)
        longest = max(longest, int(decoder.decoded.max()))

        stays = random.random(len(tokens)) >= 0.01
        if not stays.all():
            decoder.keep(chosen(stays, module))
            for group, own in zip(groups, np.split(stays, np.cumsum([g.rows for g in groups])[:-1]), strict=True):
                group.decoder.keep(chosen(own, module))
                group.rows = own.sum()
            groups = [group for group in groups if group.rows]
            tokens = tokens[chosen(stays, module)]
        if not groups and not waiting:
            break
    assert not waiting, "not every group was decoded"
    assert longest > ROOM, "no row outgrew its room"


def chosen(rows: np.ndarray, module: PreTrainedModel) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(rows)).to(module.device)


@pytest.mark.parametrize("kind", SHARED)
def test_slots_decode_as_groups_alone_do(kind):
    model = tiny_model(kind)
    model.set_attn_implementation("covey")
    recorded = []
    decode_both(model, GraphDecoder(model, 20, 4 * ROOM, record=lambda step: recorded.append(step) or step))
    assert 3 <= len(recorded) < 20


def test_a_row_that_left_with_its_room_full_needs_no_more():
    model = tiny_model("llama")
    model.set_attn_implementation("covey")
    decoder = GraphDecoder(model, 3, 4 * ROOM)
    decoder.add([[5, 6, 7]], 1)
    decoder.step(torch.tensor([3]))
    decoder.add([[8, 9], [4]], 1)
    for _ in range(ROOM - 1):
        decoder.step(torch.tensor([3, 4, 5]))
    decoder.keep(torch.tensor([1, 2]))
    assert decoder.step(torch.tensor([4, 5])).isfinite().all()
    assert decoder.slots.count == 3, "the slot should have been empty"


@needs_gpu
@pytest.mark.parametrize("kind", SHARED)
def test_a_recorded_step_decodes_as_groups_alone_do(kind):
    model = tiny_model(kind).cuda()
    model.set_attn_implementation("covey")
    decode_both(model, GraphDecoder(model, 20, 4 * ROOM))
