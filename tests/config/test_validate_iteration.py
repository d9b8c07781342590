"""The [iteration] table: combinations that cannot work are refused in one line that names the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config import ArithmeticConfig, ConfigError, IterationConfig, ReferenceConfig, RewardConfig, RunConfig
from covey.config.rules import validate

VERIFIER = RewardConfig(name="numeric", weight=0.0, score=True)


@pytest.fixture
def model(tmp_path: Path) -> RewardConfig:
    """A reward with a folder that looks like a reward model's, as far as validation reads it."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    return RewardConfig(model=str(tmp_path))


def config(*rewards: RewardConfig, steps: int = 40, **changes: Any) -> RunConfig:
    table = IterationConfig(steps=changes.pop("iteration_steps", 10), **changes.pop("iteration", {}))
    return RunConfig(task=ArithmeticConfig(), steps=steps, rewards=rewards, iteration=table, **changes)


def test_an_iterative_run_has_one_reward_model_and_a_verifier(model: RewardConfig) -> None:
    validate(config(model, VERIFIER))
    validate(config(replace(VERIFIER, weight=1.0, score=False), model))  # the first reward is the one that is averaged
    with pytest.raises(ConfigError, match=r'and there is none: give one .* model = "FOLDER"'):
        validate(config(VERIFIER))
    with pytest.raises(ConfigError, match="and there are several"):
        validate(config(model, model, VERIFIER))
    for rewards in ((model,), (model, replace(VERIFIER, weight=1.0, score=False))):
        with pytest.raises(ConfigError, match=r"labels completions with a verifier.*weight = 0.0 and score = true"):
            validate(config(*rewards))


def test_fields_that_contradict_each_other(model: RewardConfig) -> None:
    with pytest.raises(ConfigError, match=r"steps \(44\) is not a multiple of iteration.steps \(10\).*set steps to 40"):
        validate(config(model, VERIFIER, steps=44))
    with pytest.raises(ConfigError, match=r"reference.refresh_every is set.*remove it"):
        validate(config(model, VERIFIER, reference=ReferenceConfig(refresh_every=5)))
    with pytest.raises(
        ConfigError, match=r"iteration.reward_model_epochs is set, but has no effect while iteration.steps is unset"
    ):
        validate(config(VERIFIER, iteration_steps=None, iteration={"reward_model_epochs": 2}))
    with pytest.raises(ConfigError, match="replay_fraction must be below 1"):
        validate(config(model, VERIFIER, iteration={"replay_fraction": 1.0}))


def test_the_command_refuses_a_recipe_without_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["iterate", "arithmetic_grpo"]) == 2
    assert "arithmetic_grpo is not an iterative run: set iteration.steps" in capsys.readouterr().err
    assert main(["iterate", "cartpole_grpo"]) == 2
    assert "cartpole_grpo is not an iterative run" in capsys.readouterr().err
    assert main(["iterate"]) == 2
    assert "name a recipe, such as: covey iterate my.toml" in capsys.readouterr().err
