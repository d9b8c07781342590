"""A run that is killed and resumed ends with the same bits as one that was never stopped."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from helpers.run_helpers import CALLS_OF_A_STEP, Moment, covey, files, reproducible_metrics, write_recipe
from helpers.tiny_models import tiny_folder

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_recipe(folder, tiny_folder(folder / "model"), STEPS)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, recipe: Path) -> Path:
    code, output = covey("train", recipe, "--run-dir", "whole", cwd=folder)
    assert code == 0, output
    return folder / "whole"


def assert_same(run_dir: Path, uninterrupted: Path) -> None:
    """Weights, optimizer state, metrics and rollouts: all equal, to the last bit."""
    assert reproducible_metrics(run_dir) == reproducible_metrics(uninterrupted)
    assert files(run_dir / "rollouts") == files(uninterrupted / "rollouts")
    last = f"step-{STEPS:08d}"
    checkpoint, expected = (files(path / "checkpoints" / last) for path in (run_dir, uninterrupted))
    assert checkpoint["tensors.safetensors"] == expected["tensors.safetensors"]
    assert checkpoint["state.json"] == expected["state.json"]
    assert files(run_dir / "model") == files(uninterrupted / "model")


@pytest.mark.slow
def test_an_uninterrupted_run_moves_every_part(uninterrupted):
    metrics = reproducible_metrics(uninterrupted)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert sum(line["update/optimizer_steps"] for line in metrics) > STEPS
    assert metrics[-1]["kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_sigkill_at_random_moments_and_resume_ends_with_the_same_bits(seed, folder, recipe, uninterrupted):
    """Anywhere in a step: sampling, updating, writing a checkpoint."""
    rng = random.Random(seed)
    run_dir = folder / f"killed{seed}"
    words: tuple[object, ...] = "train", recipe, "--run-dir", run_dir
    for step in sorted(rng.sample(range(1, STEPS), 2)):
        code, output = covey(*words, cwd=folder, moment=Moment(step, rng.randrange(CALLS_OF_A_STEP)))
        assert code == -signal.SIGKILL, output
        words = "train", "--resume", run_dir
    code, output = covey(*words, cwd=folder)
    assert code == 0, output
    assert "resuming after step" in output
    assert_same(run_dir, uninterrupted)


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(folder, recipe, uninterrupted):
    run_dir = folder / "stopped"
    stopped = Moment(3, CALLS_OF_A_STEP // 2, signal.SIGINT)
    code, output = covey("train", recipe, "--run-dir", run_dir, cwd=folder, moment=stopped)
    assert code == 130
    assert f"covey train --resume {run_dir}" in output
    assert "Traceback" not in output
    done = len(reproducible_metrics(run_dir))
    assert 3 <= done < STEPS
    assert (run_dir / "checkpoints" / f"step-{done:08d}").is_dir(), "the last step must be in a checkpoint"
    code, output = covey("train", "--resume", run_dir, cwd=folder)
    assert code == 0, output
    assert f"resuming after step {done}" in output
    assert_same(run_dir, uninterrupted)


@pytest.mark.slow
def test_a_finished_run_resumes_to_its_end_again(folder, uninterrupted):
    before = files(uninterrupted / "model")
    code, output = covey("train", "--resume", uninterrupted, cwd=folder)
    assert code == 0, output
    assert files(uninterrupted / "model") == before


@pytest.mark.slow
def test_another_machine_is_named(folder, recipe, uninterrupted, tmp_path):
    import json
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(uninterrupted, copy)
    origin = json.loads((copy / "origin.json").read_text())
    origin["environment"]["torch"] = "1.0"
    (copy / "origin.json").write_text(json.dumps(origin))
    code, output = covey("train", "--resume", copy, cwd=folder)
    assert code == 0
    assert "torch was 1.0" in output
