"""The [lora] table, and adapters (LoRA) in peft's format: where they are, and their configs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covey.config.common import ConfigError, Fault, Table, config_field
from covey.config.fields import command
from covey.config.files import read_json, user_path
from covey.config.model_sources import ADAPTER_CONFIG_FILE, ADAPTER_FOLDER, CONFIG_FILE

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
# Fields of an adapter_config.json that change what an adapter computes, with the values that covey computes.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(
        (
            "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
            "layer_replication", "trainable_token_indices", "target_parameters", "exclude_modules", "use_qalora",
            "use_bdlora", "arrow_config", "alora_invocation_tokens", "velora_config", "monteclora_config",
            "kasa_config", "megatron_config",
        ),
        (None, False, [], {}),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class LoRAConfig(Table):
    SWITCH = ("rank", "adapter")

    rank: int = config_field(
        0,
        "rank of a low-rank adapter (LoRA), which is trained instead of the model's weights; 0: all weights are "
        "trained; needs covey[lora]",
        min=0,
        max=4096,
    )
    alpha: float = config_field(32.0, "the adapter's product is multiplied by alpha / rank", above=0)
    dropout: float = config_field(0.0, "dropout of the adapter's inputs; only 0 is supported", min=0, below=1)
    targets: tuple[str, ...] = config_field(
        (),
        'names of the linear layers that get an adapter, such as ["q_proj", "v_proj"]; empty: all below the output '
        "layer",
    )
    adapter: str = config_field(
        "",
        "folder of an adapter in peft's format, or a finished run with one: training begins with it, and rank, alpha "
        "and targets are those of its file",
    )

    @property
    def is_used(self) -> bool:
        """True if an adapter is trained instead of all weights."""
        return self.rank > 0 or bool(self.adapter)

    def faults(self) -> Iterator[Fault]:
        if self.dropout and self.is_used:
            yield Fault(
                f"lora.dropout is {self.dropout:g}: it must be 0, because a ratio compares two evaluations of the same "
                "tokens, and dropout would change each at random"
            )
        default = LoRAConfig()
        for name in ("rank", "alpha", "targets") if self.adapter else ():
            if getattr(self, name) != getattr(default, name):
                yield Fault(f"lora.{name} is read from the file of lora.adapter: remove lora.{name}")

    def check(self) -> None:
        if self.is_used and find_spec("peft") is None:
            raise ConfigError('LoRA needs the package peft: pip install "covey[lora]"')
        resolved(self)


def adapter_folder(name: str) -> Path:
    """The folder of an adapter, by its path or that of the run that trained it.

    Raises:
        ConfigError: if there is none.
    """
    folder = user_path(name, "lora.adapter: ")
    if (folder / CONFIG_FILE).is_file() and (folder / ADAPTER_FOLDER).is_dir():
        folder = folder / ADAPTER_FOLDER
    for file in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ConfigError(
                f"lora.adapter: {name} has no {file}, so it is not an adapter in peft's format: name a folder with "
                f"{ADAPTER_CONFIG_FILE} and {ADAPTER_WEIGHTS_FILE}, or a finished run with LoRA; of a checkpoint "
                f"write it by {command('export', 'RUN@STEP', 'FOLDER', '--adapter')}"
            )
    return folder


def adapter_files(name: str) -> list[str]:
    """The files of an adapter, by its path or that of the run that trained it."""
    folder = adapter_folder(name)
    return [str(folder / file) for file in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)]


def resolved(lora: LoRAConfig) -> LoRAConfig:
    """The config with rank, alpha and targets of the adapter with which training begins, if there is one.

    Raises:
        ConfigError: if that is not a LoRA adapter that covey computes.
    """
    return read_adapter_config(adapter_folder(lora.adapter), lora) if lora.adapter else lora


def base_name(folder: Path) -> str:
    """The name of the base model in the config of an adapter; "" if it names none."""
    fields = read_json(folder / ADAPTER_CONFIG_FILE, strict=False)
    name = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    return name if isinstance(name, str) else ""


def read_adapter_config(folder: Path, lora: LoRAConfig) -> LoRAConfig:
    """`lora` with rank, alpha and targets of the adapter in a folder.

    Raises:
        ConfigError: if it is not a LoRA adapter that covey computes.
    """
    path = folder / ADAPTER_CONFIG_FILE
    fields = read_json(path, strict=False)
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is damaged: it must hold a JSON object")
    for name, values in PLAIN.items():
        if fields.get(name) not in values:
            raise ConfigError(
                f"lora.adapter: {path} has {name} = {str(fields.get(name))[:60]!r}, which covey does not compute: take "
                "a plain LoRA adapter, or merge this one (peft: merge_and_unload) and train the merged model"
            )
    rank, alpha, targets = (fields.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if targets == "all-linear":
        targets = []
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha < 1e30
    is_list = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if type(rank) is not int or not 0 < rank <= 1 << 16 or not is_number or not is_list:
        raise ConfigError(
            f"lora.adapter: {path} must have a rank r, a number lora_alpha and a list target_modules: take an adapter "
            "that peft saved"
        )
    assert isinstance(alpha, int | float)
    scale = math.sqrt(rank) if fields.get("use_rslora") else 1.0
    return replace(lora, rank=rank, alpha=float(alpha) * scale, targets=tuple(sorted(targets or [])))
