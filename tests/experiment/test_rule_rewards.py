"""Whole runs with the built-in rewards: every one of them, summed and normalised, and without a process left."""

import json
import math
from pathlib import Path

import psutil
import pytest

from covey import EvaluationConfig, LossConfig, RewardConfig, RunConfig, SamplingConfig, UpdateConfig, run
from covey.config import DatasetConfig
from covey.config.recipe import read_recipe
from covey.config.rewards import BUILT_IN_REWARDS
from helpers.tiny_models import tiny_folder

REWARDS = (
    RewardConfig(name="math", workers=2, timeout_seconds=60.0, score=True),
    RewardConfig(name="numeric", answer_column="number"),
    RewardConfig(name="digits", answer_column="number", weight=0.5),
    RewardConfig(name="exact"),
    RewardConfig(name="countdown"),
    RewardConfig(name="step_numbers", answer_column="steps_column"),
    RewardConfig(name="tags", tags=("a",), weight=0.1),
    RewardConfig(name="format", pattern=".*e.*", weight=0.1),
    RewardConfig(name="length", length_limit=8, length_target=2, length_shape="cosine", weight=0.5),
    RewardConfig(name="repetition", unit="characters", ngram_size=1, weight=0.25),
    RewardConfig(name="language", scripts=("latin", "han"), weight=0.25),
    RewardConfig(name="zero"),
)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["sum", "each"])
def test_a_run_with_every_built_in_reward(normalize: str, tmp_path: Path) -> None:
    # They have runs of their own: with a sandbox, on the package's problems, and of conversations.
    others = {"code", "reasoning_gym", "environment"}
    assert {reward.name for reward in REWARDS} == set(BUILT_IN_REWARDS) - others
    data = tmp_path / "data.jsonl"
    rows = [
        {"prompt": f"{i} and x", "answer": f"{i}+x", "number": i, "numbers": [i, 1], "target": i, "steps_column": [i]}
        for i in range(1, 9)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(
        model=str(tiny_folder(tmp_path / "model")),
        task=DatasetConfig(path=str(data)),
        rewards=REWARDS,
        steps=2,
        run_dir=str(tmp_path / "run"),
        sampling=SamplingConfig(prompts_per_step=2, group_size=4, max_new_tokens=8),
        loss=LossConfig(normalize_rewards=normalize),
        update=UpdateConfig(learning_rate=1e-3),
        evaluation=EvaluationConfig(problems=2),
    )
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    run(config)
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert read_recipe(str(tmp_path / "run" / "config.toml")) == config
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert math.isfinite(line["grad_norm"])
        assert line["grad_norm"] > 0
        for reward in REWARDS:
            assert math.isfinite(line[f"reward/{reward.name}"]), reward.name
