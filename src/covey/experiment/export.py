"""Writes a trained policy as an ordinary transformers folder, and as a GGUF file: `covey export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from covey.config import ConfigError, LoRAConfig
from covey.config.files import faults_of
from covey.config.model_sources import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FOLDER,
    find_origin,
    locate_model,
    read_adapter_config,
)
from covey.experiment.inference import precision_of
from covey.experiment.model_card import base_of, licence_of, model_card
from covey.llm.model.gguf import plan_gguf, write_gguf
from covey.llm.model.loading import holds_adapter, load_adapted_checkpoint, load_model, resolve_checkpoint
from covey.llm.model.lora import add_adapter, load_adapter, save_adapter
from covey.runtime.device import choose_precision
from covey.tracking.run_folder import write_folders

CARD = "README.md"


@dataclass(frozen=True)
class Exported:
    """A model, or an adapter, that was exported."""

    folder: Path
    parameters: int
    dtype: torch.dtype
    gguf: Path | None = None
    base: str = ""  # of an adapter: the model that it belongs to


def export_model(name: str, folder: Path, gguf: str = "") -> Exported:
    """Write weights, config, tokenizer and chat template of a model into a folder that transformers loads.

    The model of a run also gets a model card, README.md.

    Args:
        name: a model's name as in a recipe, such as a run folder.
        folder: a new or empty folder.
        gguf: type of the matrices in an additional GGUF file, a key of `GGUF_TYPES`; empty: there is none.

    Raises:
        ConfigError: if there is no such model, or GGUF does not support it. Nothing is written then.
        MachineError: if the folder cannot be written.
    """
    cpu = torch.device("cpu")
    name = resolve_checkpoint(name)
    dtype = choose_precision(precision_of(name), cpu)
    loaded = load_model(name, dtype=dtype, device=cpu)
    tokenizer, licence = loaded.chat.tokenizer, licence_of(base_of(name))
    plans = [plan_gguf(loaded.module, tokenizer, gguf)] if gguf else []
    files = [Path(f"{folder.absolute().name}-{plan.kind.upper()}.gguf") for plan in plans]
    origin = find_origin(name)
    card = "" if origin is None else model_card(folder.absolute().name, origin, licence)

    def save(draft: Path) -> None:
        loaded.module.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        if card:
            (draft / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
        for plan, file in zip(plans, files, strict=True):
            write_gguf(plan, loaded.module, tokenizer, draft / file, folder.absolute().name, licence)

    with faults_of(folder):
        folder.mkdir(exist_ok=True)
    write_folders(folder, save)
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    return Exported(folder, parameters, dtype, folder / files[0] if files else None)


def export_adapter(name: str, folder: Path) -> Exported:
    """Write the adapter of a run with LoRA in peft's format, with the tokenizer of its model.

    Args:
        name: the folder of a run, or one of its checkpoints.
        folder: a new or empty folder.

    Raises:
        ConfigError: if the run has no adapter.
        MachineError: if the folder cannot be written.
    """
    cpu = torch.device("cpu")
    source = locate_model(resolve_checkpoint(name))
    origin = source.origin
    if origin is None or not (origin.architecture / ADAPTER_CONFIG_FILE).is_file():
        raise ConfigError(
            f"{name} is not a run with LoRA, so there is no adapter to export: leave out --adapter, which exports the "
            "whole model"
        )
    dtype, base = choose_precision(precision_of(name), cpu), str(origin.config_tables["model"])
    if holds_adapter(source):
        loaded, adapter = load_adapted_checkpoint(source, dtype=dtype, device=cpu)
    else:
        loaded = load_model(base, dtype=dtype, device=cpu)
        saved = origin.run_dir / ADAPTER_FOLDER
        adapter = add_adapter(loaded.module, read_adapter_config(saved, LoRAConfig()))
        load_adapter(adapter, saved)

    def save(draft: Path) -> None:
        save_adapter(adapter, base, draft)
        loaded.chat.tokenizer.save_pretrained(draft)

    with faults_of(folder):
        folder.mkdir(exist_ok=True)
    write_folders(folder, save)
    parameters = sum(parameter.numel() for parameter in adapter.parameters.parameters())
    return Exported(folder, parameters, dtype, base=base)
