"""Writes a trained policy as an ordinary transformers folder, and as a GGUF file: `covey export`."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.config import ConfigError, LoRAConfig, RunConfig
from covey.config.files import faults_of
from covey.config.model_sources import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FOLDER,
    ModelKind,
    Origin,
    find_origin,
    locate_model,
    read_adapter_config,
)
from covey.config.recipe import config_from_dict, config_to_toml
from covey.experiment.advice import PYTHON_NAME, Launch, read_launch, start
from covey.experiment.evaluation import precision_of
from covey.llm.model.files import IMAGES
from covey.llm.model.gguf import plan_gguf, read_gguf_license, write_gguf
from covey.llm.model.loading import holds_adapter, load_adapted_checkpoint, load_model, resolve_checkpoint
from covey.llm.model.lora import add_adapter, load_adapter, save_adapter
from covey.runtime.device import choose_precision
from covey.tracking.run_folder import write_folders
from covey.tracking.run_reader import RunReader, scores_of_run
from covey.tracking.run_store import read_metrics

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
    loaded = load_model(name, dtype=dtype, device=cpu, family=None)
    tokenizer, licence = loaded.chat.tokenizer, licence_of(base_of(name))
    plans = [plan_gguf(loaded.module, tokenizer, gguf)] if gguf else []
    files = [Path(f"{folder.absolute().name}-{plan.kind.upper()}.gguf") for plan in plans]
    origin = find_origin(name)
    task = "image-text-to-text" if loaded.module.config.model_type in IMAGES.architectures else "text-generation"
    card = "" if origin is None else model_card(folder.absolute().name, origin, licence, task)

    def save(draft: Path) -> None:
        loaded.module.save_pretrained(draft)
        loaded.chat.save(draft)
        if card:
            (draft / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
        for plan, file in zip(plans, files, strict=True):
            write_gguf(plan, loaded.module, tokenizer, draft / file, folder.absolute().name, licence)

    return _exported(loaded.module, save, folder, dtype, gguf=folder / files[0] if files else None)


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
        loaded, adapter = load_adapted_checkpoint(source, dtype=dtype, device=cpu, family=None)
    else:
        loaded = load_model(base, dtype=dtype, device=cpu, family=None)
        saved = origin.run_dir / ADAPTER_FOLDER
        adapter = add_adapter(loaded.module, read_adapter_config(saved, LoRAConfig(load_in_4bit=origin.in_4bit)))
        load_adapter(adapter, saved)

    def save(draft: Path) -> None:
        save_adapter(adapter, base, draft)
        loaded.chat.save(draft)

    return _exported(adapter.parameters, save, folder, dtype, base=base)


def _exported(
    module: nn.Module, save: Callable[[Path], None], folder: Path, dtype: torch.dtype, **more: Any
) -> Exported:
    with faults_of(folder):
        folder.mkdir(exist_ok=True)
    write_folders(folder, save)
    return Exported(folder, sum(parameter.numel() for parameter in module.parameters()), dtype, **more)


EMBEDDED_LICENCE = "apache-2.0"  # of SmolLM2, as its authors and the package with its weights declare it
MOST_BASES = 100  # runs in a chain, each trained from the one before
_LICENCE = re.compile(r"^license:[ \t]*[\"']?([\w.+-]{1,60})[\"']?[ \t]*$", re.MULTILINE)


def base_of(model: str) -> str:
    """The model from which a chain of runs began; `model` itself if it is from no run."""
    for _ in range(MOST_BASES):
        origin = find_origin(model)
        if origin is None:
            break
        model = origin.config_tables["model"]
    return model


def licence_of(model: str) -> str:
    """The licence that a model declares, in its model card or its GGUF file; empty if it is unknown."""
    source = locate_model(model)
    if source.kind is ModelKind.EMBEDDED:
        return EMBEDDED_LICENCE
    if source.kind is ModelKind.GGUF:
        return read_gguf_license(source.path)
    card = source.path / "README.md" if source.kind is ModelKind.FOLDER else None
    if card is None or not card.is_file():
        return ""
    _, _, front = card.read_text(encoding="utf-8", errors="replace")[:20_000].partition("---")
    found = _LICENCE.search(front.partition("\n---")[0])
    return found[1] if found else ""


def model_card(name: str, origin: Origin, licence: str, task: str) -> str:
    """The text of the card.

    Args:
        name: of the exported model.
        origin: the run, and the step of its checkpoint.
        licence: of the base model; empty if it is unknown.
        task: of the model, as the hub names it.
    """
    config = config_from_dict(origin.config_tables)
    assert isinstance(config, RunConfig)
    launch = read_launch(origin.run_dir)
    step = origin.step or max((record["step"] for record in read_metrics(origin.run_dir)), default=0)
    base = _name_of(base_of(config.model))
    header = [f"license: {licence}"] if licence else []
    facts = {
        "base model": f"{base}{f' (licence: {licence})' if licence else ''}",
        "algorithm": config.algorithm,
        "recipe": launch.title if launch is not None else PYTHON_NAME,
        "step": f"{step:,} of {config.steps:,}",
        "seed": config.seed,
        "trained with": f"covey {version('covey')}",
    }
    return "\n".join(
        [
            "---",
            *header,
            "library_name: transformers",
            f"pipeline_tag: {task}",
            f"tags: [covey, {config.algorithm}, reinforcement-learning]",
            "---",
            "",
            f"# {name}",
            "",
            f"{base}, trained with reinforcement learning by covey.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {_cell(value)} |" for key, value in facts.items()),
            *_evaluations(origin.run_dir, step),
            *_command(launch, config),
            "",
            "## Settings of the run",
            "",
            "```toml",
            config_to_toml(replace(config, run_dir="")).strip(),
            "```",
            "",
        ]
    )


def _name_of(base: str) -> str:
    """A base model without the path to it."""
    return Path(base).name if Path(base).is_absolute() else base


def _cell(value: Any) -> str:
    """A value in a cell of a table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _evaluations(run_dir: Path, step: int) -> list[str]:
    """The table of the held-out scores before training and after the step, from the recorded answers."""
    reader = RunReader(run_dir)
    kind = scores_of_run(reader.config(), reader.summary())
    before, after = (_scores(reader, number) for number in (0, step))
    if not before and not after:
        return []
    count = max(map(len, (before | after).values()))
    rows = [
        f"| {limit} | {' | '.join(_interval(kind, scores.get(limit, [])) for scores in (before, after))} |"
        for limit in sorted(before | after)
    ]
    return [
        "",
        "## Evaluation",
        "",
        f"Held-out {kind.name} of greedy answers to {count:,} problems, with the 95 % interval.",
        "",
        f"| most tokens | before training | after step {step:,} |",
        "|---|---|---|",
        *rows,
    ]


def _interval(kind: Any, scores: list[float]) -> str:
    return kind.write_interval(kind.estimate(scores)) if scores else "not measured"


def _scores(reader: RunReader, step: int) -> dict[int, list[float]]:
    """The scores of the held-out answers after a step by token limit; empty if they were not recorded."""
    scores: dict[int, list[float]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        for answer in reader.held_out(step).lines:
            if answer["score"] is not None:
                scores.setdefault(int(answer["max_new_tokens"]), []).append(float(answer["score"]))
    return scores


def _command(launch: Launch | None, config: RunConfig) -> list[str]:
    """The command or the call that trains this model again."""
    if launch is None:
        return []
    kind = "sh" if launch.recipe else "python"
    return ["", "## Reproduce", "", f"```{kind}", start(launch, config, {}), "```"]
