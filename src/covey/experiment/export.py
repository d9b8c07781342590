"""Writes a trained policy as an ordinary transformers folder: `covey export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from covey.config.faults import faults_of
from covey.experiment.inference import precision_of
from covey.llm.model.loading import load_model
from covey.runtime.device import choose_precision
from covey.tracking.run_folder import write_folders


@dataclass(frozen=True)
class Exported:
    """A model that was exported."""

    folder: Path
    parameters: int
    dtype: torch.dtype


def export_model(name: str, folder: Path) -> Exported:
    """Write weights, config, tokenizer and chat template of a model into a folder that transformers loads.

    Args:
        name: a model's name as in a recipe, such as a run folder.
        folder: a new or empty folder.

    Raises:
        ConfigError: if there is no such model.
        MachineError: if the folder cannot be written.
    """
    cpu = torch.device("cpu")
    dtype = choose_precision(precision_of(name), cpu)
    loaded = load_model(name, dtype=dtype, device=cpu)

    def save(draft: Path) -> None:
        loaded.module.save_pretrained(draft)
        loaded.chat.tokenizer.save_pretrained(draft)

    with faults_of(folder):
        folder.mkdir(exist_ok=True)
    write_folders(folder, save)
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    return Exported(folder, parameters, dtype)
