"""Small language runs for the diagnosis: a tiny model, a task of one-digit sums, and rewards of single characters."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from covey.config.recipe import config_from_dict
from covey.experiment.job import open_store
from covey.experiment.run import open_builder
from covey.runtime.distributed import ALONE
from covey.tracking.console import Display
from covey.tracking.diagnosis import Diagnosis, Finding
from covey.tracking.run_store import read_metrics
from covey.train.loop import train
from covey.train.state import Components, Progress
from helpers.tiny_models import tiny_folder

Tables = Mapping[str, Any]
Reward = Callable[..., list[float]]

TINY: Tables = {
    "algorithm": "grpo",
    "steps": 40,
    "precision": "fp32",
    "threads": 1,
    "show_rollouts_every": 0,
    "task": {"name": "arithmetic", "digits": [1]},
    "sampling": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 8},
    "loss": {"kl_coefficient": 0.0},
    "update": {"learning_rate": 3e-3},
    "evaluation": {"problems": 8},
    "checkpoint": {"every": 1000},
}
CARTPOLE: Tables = {
    "algorithm": "grpo",
    "steps": 40,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 100},
    "rollouts": {"kind": "episodes", "starts_per_step": 2, "group_size": 8},
    "update": {"learning_rate": 2.5e-3, "epochs": 3},
    "checkpoint": {"every": 1000},
}
CARTPOLE_PPO: Tables = {
    "algorithm": "ppo",
    "steps": 60,
    "environment": {"id": "CartPole-v1", "max_episode_steps": 100},
    "rollouts": {"kind": "fragments", "environments": 4, "fragment_steps": 64, "gamma": 0.99},
    "update": {"learning_rate": 2.5e-3, "epochs": 4},
    "checkpoint": {"every": 1000},
}


def merged(first: Tables, second: Tables) -> dict[str, Any]:
    """Tables of which the second replaces and adds fields."""
    both = dict(first)
    for name, value in second.items():
        both[name] = merged(both[name], value) if isinstance(value, Mapping) and name in both else value
    return both


def texts_of(completions: Sequence[Any]) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def share_of(wanted: Callable[[str], bool], text: str) -> float:
    return sum(map(wanted, text)) / max(len(text), 1)


def chance(text: str) -> float:
    """A number from 0 to 1 that a text determines and nothing in the text explains."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32


def digits(completions: Sequence[Any], **_: Any) -> list[float]:
    """Fraction of digits."""
    return [share_of(str.isdigit, text) for text in texts_of(completions)]


def lower_case(completions: Sequence[Any], **_: Any) -> list[float]:
    """Fraction of lower-case letters."""
    return [share_of(str.islower, text) for text in texts_of(completions)]


def begins_with_a_digit(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 if the first character is a digit, else 0."""
    return [float(text[:1].isdigit()) for text in texts_of(completions)]


def short(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 if there are fewer than 8 characters, so that the completion has ended, else 0."""
    return [float(len(text) < 8) for text in texts_of(completions)]


def train_tables(
    folder: Path,
    tables: Tables,
    rewards: Sequence[Reward] = (),
    change: Callable[[Components], object] = lambda parts: None,
) -> tuple[list[dict[str, Any]], list[Finding], list[Finding]]:
    """Train from the tables of a recipe, without evaluations. `change` gets the components before they are used.

    Returns:
        The metrics, the findings that were shown during training, and all findings at the end.
    """
    language = "environment" not in tables
    if language and not (folder / "model").exists():
        tiny_folder(folder / "model")
    config = config_from_dict(merged(tables, {"model": str(folder / "model")}) if language else dict(tables))
    shown: list[Finding] = []
    diagnosis = Noted(tables, shown)
    builder = open_builder(config, None, list(rewards), ALONE)
    number = sum(1 for _ in folder.glob("run-*"))
    try:
        with open_store(ALONE, folder / f"run-{number}") as store:
            display = Display(
                console=Console(quiet=True), domain=builder.name, score_kind=builder.score_kind, diagnosis=diagnosis
            )
            experiment = builder.build(store, display)
            change(experiment.parts)
            experiment.parts.sampler.refresh(0)
            train(experiment.parts, experiment.settings, Progress(), should_stop=lambda: False)
            return read_metrics(store.run_dir), shown, diagnosis.findings()
    finally:
        builder.close()


class Noted(Diagnosis):
    """Keeps what it returns for the display."""

    def __init__(self, config: Tables, shown: list[Finding]) -> None:
        super().__init__(config)
        self._shown = shown

    def add(self, step: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        new = super().add(step, metrics)
        self._shown += new
        return new
