"""Runs of conversations: an environment that is not repeatable is noticed, one that cannot be used refused."""

import json
import signal
from pathlib import Path

import pytest

from helpers import guessing
from helpers.run_helpers import Moment, covey
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
def test_an_environment_that_is_not_repeatable_is_noticed(folder):
    code, output = covey(
        "train", recipe_of(folder, "Unrepeatable", steps=1), "--run-dir", folder / "unrepeatable", cwd=folder
    )
    assert code == 0, output
    assert "Unrepeatable is not repeatable" in " ".join(output.split())
    metrics = json.loads((folder / "unrepeatable" / "metrics.jsonl").read_text())
    assert metrics["conversation/different_prompts"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["Clock", "Unseeded"])
def test_an_environment_with_a_clock_or_an_unseeded_generator_is_noticed(folder, environment):
    code, output = covey("check", recipe_of(folder, environment), cwd=folder)
    assert code == 0, output
    assert f"{environment} is not repeatable" in " ".join(output.split())


@pytest.mark.slow
def test_an_environment_that_is_not_repeatable_in_later_turns_is_noticed_after_a_resume(folder):
    run_dir = folder / "late"
    code, output = covey("train", recipe_of(folder, "Late"), "--run-dir", run_dir, cwd=folder, moment=Moment(2))
    assert code == -signal.SIGKILL
    assert "not repeatable" not in output
    code, output = covey("train", "--resume", run_dir, cwd=folder)
    assert code == 0, output
    said = " ".join(output.split())
    assert "step 2 was sampled again, and its rollouts differ from those that were recorded before the resume" in said
    assert "messages" in said
    assert said.count("was sampled again") == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [("Stubborn", "in a dry run: RuntimeError: never (guessing.py line"), ("Nothing", "Nothing is not an environment")],
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
