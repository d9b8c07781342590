"""PPO on a language model: one word turns a recipe into it, a kill changes no bit, and its critic is handed on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from helpers.run_helpers import CALLS_OF_A_STEP, Moment, covey, files, reproducible_metrics, write_recipe
from helpers.tiny_models import tiny_folder

STEPS = 6
# warm-up and further passes of the critic, so that what was left out or repeated after a kill would show
MORE = ("--critic-warmup-steps", "2", "--critic-epochs", "1", "--critic-learning-rate", "3e-3", "--precision", "bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ppo")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_recipe(folder, tiny_folder(folder / "model"), STEPS)


@pytest.fixture(params=["own", "policy"])
def uninterrupted(request, folder: Path, recipe: Path) -> tuple[str, Path]:
    """The kind of trunk, and a run that was never stopped; each is made once."""
    run_dir = folder / f"whole-{request.param}"
    if not run_dir.exists():
        words = ("--algorithm", "ppo", "--trunk", request.param, *MORE)
        code, output = covey("train", recipe, *words, "--run-dir", run_dir, cwd=folder)
        assert code == 0, output
    return request.param, run_dir


@pytest.mark.slow
def test_the_same_recipe_with_ppo_trains_policy_and_critic(uninterrupted):
    trunk, run_dir = uninterrupted
    metrics = reproducible_metrics(run_dir)
    assert [line["update/optimizer_steps"] for line in metrics] == [0, 0, 4, 4, 4, 4]
    assert [line["update/critic_steps"] for line in metrics] == [6] * STEPS
    assert metrics[0]["value/mean"] == 0, "values begin at zero"
    assert metrics[-1]["value/mean"] != 0
    assert all(line["groups/zero_advantage_fraction"] == 0 for line in metrics)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["algorithm"] == "ppo"
    saved = set(files(run_dir / "critic"))
    assert saved == ({"value_head.safetensors"} | ({"config.json", "model.safetensors"} if trunk == "own" else set()))


@pytest.mark.slow
@pytest.mark.parametrize("uninterrupted", ["own", "policy"], indirect=True)
def test_sigkill_and_resume_end_with_the_same_bits(uninterrupted, folder, recipe):
    trunk, expected = uninterrupted
    run_dir = folder / f"killed-{trunk}"
    words = ("--algorithm", "ppo", "--trunk", trunk, *MORE)
    given: tuple[object, ...] = "train", recipe, *words, "--run-dir", run_dir
    for step in (1, 4):
        code, output = covey(*given, cwd=folder, moment=Moment(step, CALLS_OF_A_STEP // step))
        assert code == -signal.SIGKILL, output
        given = "train", "--resume", run_dir
    code, output = covey(*given, cwd=folder)
    assert code == 0, output
    assert "resuming after step" in output
    assert reproducible_metrics(run_dir) == reproducible_metrics(expected)
    last = f"checkpoints/step-{STEPS:08d}"
    for part in ("rollouts", "model", "critic", last):
        made, wanted = files(run_dir / part), files(expected / part)
        assert made.keys() == wanted.keys()
        for name in made.keys() - {"manifest.json"}:
            assert made[name] == wanted[name], f"{part}/{name}"


@pytest.mark.slow
def test_a_run_that_starts_from_another_takes_over_its_critic(uninterrupted, folder, recipe):
    trunk, before = uninterrupted
    run_dir = folder / f"next-{trunk}"
    words = ("--algorithm", "ppo", "--trunk", trunk, "--steps", "1", "--model", before)
    code, output = covey("train", recipe, *words, "--run-dir", run_dir, cwd=folder)
    assert code == 0, output
    assert "the critic continues from" in output
    assert reproducible_metrics(run_dir)[0]["value/mean"] != 0


@pytest.mark.slow
def test_ppo_goes_on_from_a_run_of_grpo_with_a_new_critic(folder, recipe):
    code, output = covey("train", recipe, "--steps", "1", "--run-dir", folder / "grpo", cwd=folder)
    assert code == 0, output
    words = ("--algorithm", "ppo", "--steps", "1", "--model", folder / "grpo")
    code, output = covey("train", recipe, *words, "--run-dir", folder / "then-ppo", cwd=folder)
    assert code == 0, output
    assert reproducible_metrics(folder / "then-ppo")[0]["value/mean"] == 0
