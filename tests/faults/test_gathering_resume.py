"""A run whose steps draw again, or whose groups differ in size, ends with the same bits after a kill."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from helpers.cases import slow_unless
from helpers.run_helpers import Moment, covey, files, reproducible_metrics
from helpers.tiny_models import tiny_folder

STEPS = 6
PROMPTS = 60
RECIPE = """
model = "{model}"
algorithm = "{algorithm}"
steps = {steps}
seed = 3
threads = 1
precision = "fp32"

[task]
name = "dataset"
path = "{data}"

[[rewards]]
function = "{reward}:digits"

[sampling]
prompts_per_step = 4
group_size = 6
max_new_tokens = 5
{sampling}
[update]
learning_rate = 1e-3
minibatches = 2

[evaluation]
problems = 4
every = 1
patience = 20

[checkpoint]
every = 2
best = true

[record]
tokens = true
"""

# Right or wrong, so that some groups are all alike.
REWARD = """
import re

def digits(completions, **columns):
    return [float(len(re.findall("[0-9]", c)) >= 2) for c in completions]
"""

WAYS = {
    "max_resamples": ("dapo", "max_resamples = 2\noverlong_tokens = 0\n"),
    "selection": ("grpo", "\n[selection]\ncandidates = 3\n"),
    "replay": ("grpo", "\n[replay]\ngroups = 3\nmax_age = 2\n"),
    "adaptive": ("grpo", "adaptive = true\ninitial_group_size = 3\nfinal_group_size = 12\n"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("gathering")
    tiny_folder(made / "model")
    (made / "rewards.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"{number}+{number % 7}", "answer": "1"}) for number in range(PROMPTS)]
    (made / "prompts.jsonl").write_text("\n".join(lines))
    for name, (algorithm, sampling) in WAYS.items():
        (made / f"{name}.toml").write_text(
            RECIPE.format(
                model=made / "model", algorithm=algorithm, steps=STEPS, data=made / "prompts.jsonl",
                reward=made / "rewards.py", sampling=sampling,
            )
        )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Path]:
    """Runs that were never stopped."""
    for way in WAYS:
        code, output = covey("train", f"{way}.toml", "--run-dir", folder / f"{way}-whole", cwd=folder)
        assert code == 0, output
    return {way: folder / f"{way}-whole" for way in WAYS}


def rollouts_of(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_unless(["replay"], WAYS))
def test_killed_and_resumed_ends_with_the_same_bits(way, folder, whole):
    expected, killed = whole[way], folder / f"{way}-killed"
    code, output = covey("train", f"{way}.toml", "--run-dir", killed, cwd=folder, moment=Moment(3))
    assert code == -signal.SIGKILL, output
    code, output = covey("train", "--resume", killed, cwd=folder)
    assert code == 0, output
    assert "resuming after step" in output
    assert reproducible_metrics(killed) == reproducible_metrics(expected)
    assert files(killed / "rollouts") == files(expected / "rollouts")
    assert files(killed / "model") == files(expected / "model")
    last = f"checkpoints/step-{STEPS:08d}"
    assert files(killed / last)["tensors.safetensors"] == files(expected / last)["tensors.safetensors"]
    assert files(killed / last)["state.json"] == files(expected / last)["state.json"]


@pytest.mark.slow
def test_a_run_with_replay_records_every_rollout_once(whole):
    metrics = reproducible_metrics(whole["replay"])
    assert max(line["replay/groups"] for line in metrics) > 0
    for line in metrics:
        rollouts = rollouts_of(whole["replay"], line["step"])
        assert len(rollouts) == 4 * 6
        assert sum(record["decisions"] for record in rollouts) == line["decisions/sampled"]


@pytest.mark.slow
def test_an_adaptive_run_follows_its_budget(whole):
    metrics = reproducible_metrics(whole["adaptive"])
    assert max(line["groups/size_max"] for line in metrics) > 12
    for line, size in zip(metrics, (6, 7, 8, 10, 11, 12), strict=True):
        assert 4 * line["groups/size_mean"] + line["groups/unused_budget"] == 4 * size
        assert len(rollouts_of(whole["adaptive"], line["step"])) == 4 * line["groups/size_mean"]


def test_a_pass_over_the_file_meets_every_prompt_once_and_every_rollout_is_recorded(whole):
    run_dir = whole["max_resamples"]
    metrics = reproducible_metrics(run_dir)
    assert max(line["groups/resamples"] for line in metrics) > 0
    drawn: list[str] = []
    for line in metrics:
        rollouts = rollouts_of(run_dir, line["step"])
        groups = {record["group"]: record for record in rollouts}
        assert len(groups) == line["groups/drawn"]
        assert sum(record["decisions"] for record in rollouts) == line["decisions/sampled"]
        for number in groups:
            mine = [record for record in rollouts if record["group"] == number]
            assert len(mine) == 6
            if mine[0].get("dropped"):
                assert len({record["reward"] for record in mine}) == 1
        drawn += [groups[number]["prompt"] for number in sorted(groups)]
    training = PROMPTS - PROMPTS // 10
    assert set(Counter(drawn[:training]).values()) == {1}
    assert any(record.get("dropped") for line in metrics for record in rollouts_of(run_dir, line["step"]))
