"""A run with an adapter ends with the same bits after a kill, and only on the weights that it began with."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from helpers.run_helpers import CALLS_OF_A_STEP, Moment, covey, files, reproducible_metrics, write_recipe
from helpers.tiny_models import tiny_folder

pytestmark = pytest.mark.slow
STEPS = 6
WORDS = {
    "grpo": ("--rank", "2", "--precision", "bf16"),
    "refreshed": ("--rank", "2", "--refresh-every", "2", "--refresh-fraction", "0.5", "--precision", "bf16"),
    "ppo": ("--rank", "2", "--algorithm", "ppo", "--trunk", "adapter", "--critic-learning-rate", "3e-3"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_recipe(folder, tiny_folder(folder / "model"), STEPS)


@pytest.mark.parametrize("kind", ["grpo", "refreshed", "ppo"])
def test_sigkill_and_resume_end_with_the_same_bits(kind: str, folder: Path, recipe: Path) -> None:
    whole, run_dir = folder / f"whole-{kind}", folder / f"killed-{kind}"
    code, output = covey("train", recipe, *WORDS[kind], "--run-dir", whole, cwd=folder)
    assert code == 0, output
    given: tuple[object, ...] = "train", recipe, *WORDS[kind], "--run-dir", run_dir
    for step in (1, 4):
        code, output = covey(*given, cwd=folder, moment=Moment(step, CALLS_OF_A_STEP // step))
        assert code == -signal.SIGKILL, output
        given = "train", "--resume", run_dir
    code, output = covey(*given, cwd=folder)
    assert code == 0, output
    assert "resuming after step" in output
    assert reproducible_metrics(run_dir) == reproducible_metrics(whole)
    last = f"checkpoints/step-{STEPS:08d}"
    for part in ("rollouts", "model", "adapter", "architecture", last, *(["critic"] if kind == "ppo" else [])):
        made, wanted = files(run_dir / part), files(whole / part)
        assert made, part
        assert made.keys() == wanted.keys()
        for name in made.keys() - {"manifest.json"}:
            assert made[name] == wanted[name], f"{part}/{name}"


def test_a_run_is_resumed_on_its_own_base_and_adapter_alone(folder: Path, recipe: Path, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    words = ("--rank", "2", "--steps", "1", "--model", model, "--run-dir", "a")
    code, output = covey("train", recipe, *words, cwd=tmp_path)
    assert code == 0, output
    words = ("--adapter", "a", "--model", model, "--run-dir", "b")
    code, output = covey("train", recipe, *words, cwd=tmp_path, moment=Moment(3))
    assert code == -signal.SIGKILL, output
    tiny_folder(model, seed=1)
    code, output = covey("train", "--resume", "b", cwd=tmp_path)
    assert code == 2, output
    assert "the model's weights are not those of" in output
    tiny_folder(model)
    saved = (tmp_path / "a" / "adapter" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "a" / "adapter" / "adapter_model.safetensors").write_bytes(saved[:-4] + b"\0\0\0\0")
    code, output = covey("train", "--resume", "b", cwd=tmp_path)
    assert code == 2, output
    assert "adapter_model.safetensors has changed since the run began" in output
    (tmp_path / "a" / "adapter" / "adapter_model.safetensors").write_bytes(saved)
    code, output = covey("train", "--resume", "b", cwd=tmp_path)
    assert code == 0, output
