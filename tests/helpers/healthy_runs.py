"""Healthy runs, in which the diagnosis must find nothing: packaged recipes and tiny models that learn.

    PYTHONPATH=tests .venv/bin/python -m helpers.healthy_runs runs/healthy

trains those that the folder lacks (one line of JSON for each run), and writes what the tests read:
tests/tracking/diagnosis/healthy_runs.jsonl.xz, with their settings and metrics. It takes about an hour on two cores,
most of it for the runs of the embedded model, which are commands (`COMMANDS`).
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from covey.config.recipe import read_recipe, read_tables
from covey.config.recipe_writing import config_to_dict
from covey.tracking.metrics import find
from covey.tracking.run_store import SUMMARY_FILE, read_metrics
from helpers.diagnosed_runs import (
    TINY,
    Reward,
    Tables,
    begins_with_a_digit,
    digits,
    lower_case,
    merged,
    train_tables,
)

RECORDED = Path(__file__).parents[1] / "tracking" / "diagnosis" / "healthy_runs.jsonl.xz"
DIGITS_KEPT = 6


@dataclass(frozen=True)
class Healthy:
    """A recipe that trains as it should."""

    tables: Tables
    rewards: tuple[Reward, ...] = ()


def recipe(*words: str) -> Healthy:
    """A packaged recipe with changed fields, as on the command line."""
    return Healthy(config_to_dict(read_recipe(words[0], words[1:])))


def tiny(reward: Reward, **changes: Any) -> Healthy:
    return Healthy(merged(TINY, changes), (reward,))


ONE_EPOCH = ("--steps", "120")
HEALTHY: dict[str, Healthy] = {
    "cartpole_grpo, seed 0": recipe("cartpole_grpo"),
    "cartpole_grpo, seed 1": recipe("cartpole_grpo", "--seed", "1"),
    "cartpole_grpo, seed 2": recipe("cartpole_grpo", "--seed", "2"),
    "cartpole, dr_grpo": recipe("cartpole_grpo", "--algorithm", "dr_grpo", "--seed", "3"),
    "cartpole, rloo": recipe("cartpole_grpo", "--algorithm", "rloo", *ONE_EPOCH),
    "cartpole, reinforce_pp": recipe("cartpole_grpo", "--algorithm", "reinforce_pp", *ONE_EPOCH),
    "cartpole, cispo": recipe("cartpole_grpo", "--algorithm", "cispo", "--steps", "60"),
    "cartpole, gspo": recipe("cartpole_grpo", "--algorithm", "gspo", "--steps", "60"),
    "cartpole_branches": recipe("cartpole_branches"),
    "cartpole_reward_to_go": recipe("cartpole_reward_to_go"),
    "cartpole_ppo, seed 0": recipe("cartpole_ppo"),
    "cartpole_ppo, seed 1": recipe("cartpole_ppo", "--seed", "1"),
    "acrobot_grpo": recipe("acrobot_grpo"),
    "acrobot_ppo": recipe("acrobot_ppo"),
    "pendulum_grpo": recipe("pendulum_grpo"),
    "pendulum_ppo": recipe("pendulum_ppo"),
    "mountaincar_continuous_grpo": recipe("mountaincar_continuous_grpo"),
    "mountaincar_continuous_ppo": recipe("mountaincar_continuous_ppo"),
    "tiny digits, grpo": tiny(digits),
    "tiny digits, grpo, seed 1": tiny(digits, seed=1),
    "tiny digits, dr_grpo": tiny(digits, algorithm="dr_grpo"),
    "tiny digits, rloo": tiny(digits, algorithm="rloo", seed=2),
    "tiny digits, reinforce_pp": tiny(digits, algorithm="reinforce_pp"),
    "tiny digits, gspo, two minibatches": tiny(digits, algorithm="gspo", update={"minibatches": 2}),
    "tiny digits, cispo, two minibatches": tiny(digits, algorithm="cispo", update={"minibatches": 2}),
    "tiny digits, ppo": tiny(digits, algorithm="ppo", steps=60),
    "tiny letters, grpo, two epochs": tiny(lower_case, update={"epochs": 2, "learning_rate": 1e-3}),
    "tiny first digit, dapo": tiny(begins_with_a_digit, algorithm="dapo", sampling={"overlong_tokens": 0}, steps=30),
    "tiny first digit, grpo": tiny(begins_with_a_digit, update={"learning_rate": 1e-3}),
    "tiny first digit, KL 0.05": tiny(begins_with_a_digit, loss={"kl_coefficient": 0.05}, seed=3),
}
# Runs of the embedded model, by the command that made them; their folders have the name of the run.
COMMANDS = {
    "family": "covey train family --token-budget 24000 --threads 1",
}


@dataclass(frozen=True)
class RecordedRun:
    """A run as the tests read it."""

    name: str
    config: Mapping[str, Any]
    metrics: list[dict[str, float | None]]
    evaluations: list[dict[str, Any]]


def read_recorded() -> list[RecordedRun]:
    """The recorded healthy runs."""
    with lzma.open(RECORDED, "rt") as file:
        return [RecordedRun(**json.loads(line)) for line in file]


def record(folder: Path) -> None:
    """Train the runs that `folder` lacks, and write those that it has in the form that the tests read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, healthy in HEALTHY.items():
        path = folder / f"{name}.json"
        if not path.exists():
            with TemporaryDirectory() as temporary:
                metrics, _, found = train_tables(Path(temporary), healthy.tables, healthy.rewards)
            line = {"name": name, "config": dict(healthy.tables), "metrics": metrics, "evaluations": []}
            path.write_text(json.dumps(line))
            print(name, [finding.line for finding in found], flush=True)
    with lzma.open(RECORDED, "wt", preset=9) as file:
        for name in HEALTHY:
            file.write(json.dumps(_compact(json.loads((folder / f"{name}.json").read_text()))) + "\n")
        for name in COMMANDS:
            if (folder / name / SUMMARY_FILE).exists():
                file.write(json.dumps(_compact(_of_folder(name, folder / name))) + "\n")


def _of_folder(name: str, run_dir: Path) -> dict[str, Any]:
    evaluations = json.loads((run_dir / SUMMARY_FILE).read_text())["evaluations"]
    config = read_tables(run_dir / "config.toml")
    return {"name": name, "config": config, "metrics": read_metrics(run_dir), "evaluations": evaluations}


def _compact(line: dict[str, Any]) -> dict[str, Any]:
    """A run without the metrics that differ from run to run, and with rounded numbers."""
    return line | {"metrics": [dict(_rounded(record)) for record in line["metrics"]]}


def _rounded(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if name == "step" or value is None:
            yield name, value
        elif find(name).reproducible:
            yield name, float(f"{value:.{DIGITS_KEPT}g}")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
