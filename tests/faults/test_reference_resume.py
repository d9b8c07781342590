"""A run whose reference is refreshed and whose KL coefficient follows a target ends with the same bits after a kill."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from helpers.run_helpers import Moment, covey, files, reproducible_metrics
from helpers.tiny_models import tiny_folder

STEPS = 7
RECIPE = """
model = "{model}"
steps = {steps}
seed = 3
threads = 1
precision = "{precision}"

[task]
name = "arithmetic"
digits = [1]

[[rewards]]
function = "{reward}:digits"

[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 5

[loss]
kl_coefficient = 0.1
kl_estimator = "exact"
adaptive_kl_target = 0.01
adaptive_kl_horizon = 40
kl_warmup_steps = 2
importance_cap = 2.0

[reference]
refresh_every = 2
refresh_fraction = {share}

[update]
learning_rate = 1e-3
epochs = 2

[evaluation]
problems = 4

[checkpoint]
every = 3
"""

REWARD = """
import re

def digits(completions, **columns):
    return [float(len(re.findall("[0-9]", c[0]["content"]))) for c in completions]
"""

WAYS = {"copy": (1.0, "fp32"), "average": (0.3, "fp32"), "average_bf16": (0.3, "bf16")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("reference")
    tiny_folder(made / "model")
    (made / "rewards.py").write_text(REWARD)
    for name, (share, precision) in WAYS.items():
        text = RECIPE.format(
            model=made / "model", steps=STEPS, reward=made / "rewards.py", share=share, precision=precision
        )
        (made / f"{name}.toml").write_text(text)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> Callable[[str], Path]:
    """Runs that were never stopped, each made at its first use."""

    @cache
    def made(way: str) -> Path:
        code, output = covey("train", f"{way}.toml", "--run-dir", folder / f"{way}-whole", cwd=folder)
        assert code == 0, output
        return folder / f"{way}-whole"

    return made


@pytest.mark.parametrize("way", ["copy", "average", "average_bf16"])
@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(way, folder, whole):
    expected, killed = whole(way), folder / f"{way}-killed"
    code, output = covey("train", f"{way}.toml", "--run-dir", killed, cwd=folder, moment=Moment(5))
    assert code == -signal.SIGKILL, output
    code, output = covey("train", "--resume", killed, cwd=folder)
    assert code == 0, output
    assert "resuming after step 3" in output
    assert reproducible_metrics(killed) == reproducible_metrics(expected)
    assert files(killed / "rollouts") == files(expected / "rollouts")
    assert files(killed / "model") == files(expected / "model")
    last = f"checkpoints/step-{STEPS:08d}"
    assert files(killed / last)["tensors.safetensors"] == files(expected / last)["tensors.safetensors"]
    assert files(killed / last)["state.json"] == files(expected / last)["state.json"]
    state = json.loads((expected / last / "state.json").read_text())
    assert "reference" in state
    assert state["kl_coefficient"]["next"] != 0.1


@pytest.mark.slow
def test_the_metrics_show_the_refreshes_and_the_controller(whole):
    metrics = reproducible_metrics(whole("copy"))
    coefficients = [line["kl_coefficient"] for line in metrics]
    assert coefficients[:2] == [0.05, 0.1]
    assert len(set(coefficients[1:])) > 3
    after_a_refresh = [line["kl"] for line in metrics if line["step"] in (1, 3, 5, 7) and "kl" in line]
    between = [line["kl"] for line in metrics if line["step"] in (2, 4, 6) and "kl" in line]
    assert max(after_a_refresh) < 1e-5 < min(between)
    assert all(line["mismatch/capped_fraction"] == 0 for line in metrics if "mismatch/capped_fraction" in line)
