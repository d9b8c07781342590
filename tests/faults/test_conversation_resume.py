"""Runs of conversations: a kill at any moment changes no bit, and an environment that is not repeatable is noticed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from helpers import guessing
from helpers.run_helpers import CALLS_OF_A_STEP, Moment, assert_same_run, covey
from helpers.tiny_models import tiny_folder

STEPS = 4
RECIPE = """
model = "{model}"
steps = {steps}
seed = 3
device = "cpu"
precision = "fp32"
threads = 1
[task]
name = "arithmetic"
digits = [1]
[conversation]
environment = "{environment}"
turns = 3
total_tokens = 60
[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 8
[evaluation]
problems = 4
every = 2
[checkpoint]
every = 1
[update]
learning_rate = 1e-3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    tiny_folder(folder / "model")
    return folder


def recipe_of(folder: Path, environment: str, steps: int = STEPS) -> Path:
    recipe = folder / f"{environment}.toml"
    name = f"{Path(guessing.__file__)}:{environment}"
    recipe.write_text(RECIPE.format(model=folder / "model", steps=steps, environment=name))
    return recipe


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_sigkill_and_resume_end_with_the_same_bits(folder, algorithm):
    whole, killed = folder / f"whole-{algorithm}", folder / f"killed-{algorithm}"
    words = ("train", recipe_of(folder, "Guess"), "--algorithm", algorithm)
    code, output = covey(*words, "--run-dir", whole, cwd=folder)
    assert code == 0, output
    assert "is not repeatable" not in output
    given: tuple[object, ...] = (*words, "--run-dir", killed)
    for step in (1, 3):
        code, output = covey(*given, cwd=folder, moment=Moment(step, CALLS_OF_A_STEP // (2 * step)))
        assert code == -signal.SIGKILL, output
        given = ("train", "--resume", killed)
    code, output = covey(*given, cwd=folder)
    assert code == 0, output
    assert "resuming after step" in output
    assert_same_run(killed, whole)
    lines = [json.loads(line) for line in (whole / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    assert all(line["undecided"] for line in lines if len(line["turn_rewards"]) > 1)
    assert {message["role"] for line in lines for message in line["messages"]} == {"assistant", "user"}
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(1 <= line["conversation/turns"] <= 3 for line in metrics)
    assert all(line["conversation/different_prompts"] == 0 for line in metrics)
    assert all(line["mismatch/mean"] < 1e-5 for line in metrics), "of decisions alone"
    if algorithm == "grpo":
        code, output = covey("eval", whole, "--problems", "4", cwd=folder)
        assert code == 0, output
        score = json.loads((whole / "summary.json").read_text())["evaluations"][0]["after"]["score"]
        assert f"{score:.2f}" in output


def test_an_environment_that_is_not_repeatable_is_noticed(folder):
    code, output = covey(
        "train", recipe_of(folder, "Unrepeatable", steps=1), "--run-dir", folder / "unrepeatable", cwd=folder
    )
    assert code == 0, output
    assert "Unrepeatable is not repeatable" in " ".join(output.split())


@pytest.mark.parametrize(
    ("environment", "message"),
    [("Stubborn", "in a dry run: RuntimeError: never (guessing.py line"), ("Nothing", "Nothing is no environment")],
)
def test_an_environment_that_cannot_be_used_is_refused_before_the_model_is_loaded(folder, environment, message):
    code, output = covey(
        "train",
        recipe_of(folder, environment),
        "--model",
        folder / "model",
        "--run-dir",
        folder / "refused",
        cwd=folder,
    )
    assert code != 0
    assert message in " ".join(output.split())
    assert "Llama" not in output
