"""What a model's name leads to where it is a run of covey: the model that the run saved, or one of its checkpoints."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config.base import ConfigError

CONFIG_FILE = "config.toml"
CHECKPOINTS_FOLDER = "checkpoints"
MODEL_FOLDER = "model"
CRITIC_FOLDER = "critic"

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
MANIFEST_FILE = "manifest.json"  # written last: a checkpoint without one is unfinished


@dataclass(frozen=True)
class Origin:
    """A run, as the origin of a model."""

    run_dir: Path
    step: int | None = None  # of the checkpoint that was named; None: the run as a whole was, or its model/

    @property
    def has_model(self) -> bool:
        """Whether the run came to its end and saved its model."""
        return (self.run_dir / MODEL_FOLDER / "config.json").is_file()

    @property
    def told(self) -> dict[str, Any]:
        """The tables of the run's config, which holds every field.

        Raises:
            ConfigError: if it is damaged, or that of a run without a language model.
        """
        path = self.run_dir / CONFIG_FILE
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        if "environment" in tables:
            raise ConfigError(f"model: the run in {self.run_dir} trained an agent, no language model")
        if not {"model", "algorithm"} <= tables.keys():
            raise ConfigError(f"{path} is not what a run writes down: it names no model or no algorithm")
        return tables

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.run_dir / CHECKPOINTS_FOLDER

    @property
    def from_checkpoint(self) -> bool:
        """Whether the weights are those of a checkpoint, which holds neither architecture nor tokenizer."""
        return self.step is not None or not self.has_model


def find_origin(model: str) -> Origin | None:
    """The run that `model` names by its folder, by its model/ or by one of its checkpoints; None: it names none."""
    path = Path(model).expanduser()
    if (path / CONFIG_FILE).is_file() and not (path / "config.json").is_file():
        return Origin(path)
    if path.name == MODEL_FOLDER and (path.parent / CONFIG_FILE).is_file():
        return Origin(path.parent)
    named = CHECKPOINT_NAME.fullmatch(path.name)
    if named and path.parent.name == CHECKPOINTS_FOLDER and (path.parents[1] / CONFIG_FILE).is_file():
        return Origin(path.parents[1], int(named[1]))
    return None


def architecture_of(model: str) -> str:
    """The name under which a model's architecture and tokenizer are found: its own, but where it is a checkpoint, that
    of the model which the run began with.

    Raises:
        ConfigError: for a run without a language model.
    """
    origin = find_origin(model)
    if origin is None:
        return model
    if not origin.from_checkpoint:
        return str(origin.run_dir / MODEL_FOLDER)
    return architecture_of(str(origin.told["model"]))


def check_origin(origin: Origin, model: str) -> None:
    """Refuse a run that has nothing to begin from.

    Raises:
        ConfigError: for a run on an environment, one that saved nothing yet, a checkpoint that is not there.
    """
    run_dir = origin.run_dir
    if origin.from_checkpoint:
        _ = origin.told  # refuses a run without a language model
    there = sorted(file.parent.name for file in origin.checkpoints.glob(f"*/{MANIFEST_FILE}"))
    whole = [name for name in there if CHECKPOINT_NAME.fullmatch(name)]
    if origin.step is not None and Path(model).name not in whole:
        kept = f"it has {', '.join(whole)}" if whole else "it has none"
        raise ConfigError(f"model: the run in {run_dir} has no checkpoint {Path(model).name}: {kept}")
    if origin.from_checkpoint and not whole:
        raise ConfigError(
            f"model: the run in {run_dir} has saved neither its model nor a checkpoint yet: go on with it by covey "
            f"train --resume {run_dir}"
        )
