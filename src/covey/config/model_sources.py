"""Resolves a model's name: the embedded model, a folder, a GGUF file, a run of covey or one of its checkpoints, or a
name on the model hub. Every command and every trainer calls `locate_model`.

The [lora] table, and adapters in peft's format: where they are, and their configs.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covey.config.common import ConfigError, Fault, Table, config_field, table
from covey.config.fields import command, did_you_mean, did_you_mean_file
from covey.config.files import faults_of, path_error, read_below, read_json, read_toml, unusual_kind, user_path

EMBEDDED_MODELS = ("smollm2-135m",)
CONFIG_FILE = "config.toml"
CHECKPOINTS_FOLDER = "checkpoints"
MODEL_FOLDER = "model"
CRITIC_FOLDER = "critic"
ADAPTER_FOLDER = "adapter"  # of a run with LoRA, in peft's format
REWARD_MODEL_FOLDER = "reward_model"  # of an iterative run, trained
ARCHITECTURE_FOLDER = "architecture"  # config and tokenizer of a run's model, which its checkpoints do not hold

MODEL_CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
GGUF_SUFFIX, GGUF_MAGIC = ".gguf", b"GGUF"

CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,12})")
BEST_FILE = "best.json"  # among the checkpoints of a run that keeps its best one: {"step": 40}
MANIFEST_FILE = "manifest.json"  # written last: a checkpoint without one is unfinished

RUN_AT_STEP = re.compile(r"(.+)@([0-9]{1,12}|best)")

HUB_NAME = re.compile(r"(?!.*(--|\.\.))([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


class ModelKind(Enum):
    """Kinds of sources of a model."""

    EMBEDDED = "embedded model"
    FOLDER = "folder in Hugging Face's layout"
    GGUF = "GGUF file"
    RUN = "run that was stopped before its end"
    CHECKPOINT = "checkpoint of a run"
    HUB = "name on the model hub"


@dataclass(frozen=True)
class Origin:
    """The run of covey that a model is from."""

    run_dir: Path
    step: int | None = None  # of the named checkpoint; None if the run or its model/ was named

    @property
    def has_model(self) -> bool:
        """True if the run saved its model: it is finished, or was stopped with checkpoint.model_if_stopped."""
        return (self.run_dir / MODEL_FOLDER / MODEL_CONFIG_FILE).is_file()

    @property
    def config_tables(self) -> dict[str, Any]:
        """The tables of the run's config, which holds every field.

        Raises:
            ConfigError: if it is damaged, or that of a run without a language model.
        """
        path = self.run_dir / CONFIG_FILE
        tables = read_toml(path)
        if "environment" in tables:
            raise ConfigError(
                f"model: the run in {_shown(self.run_dir)} trained an agent, no language model: see it act with "
                f"{command('eval', _shown(self.run_dir))}"
            )
        if not isinstance(tables.get("model"), str) or not isinstance(tables.get("algorithm"), str):
            raise ConfigError(f"{path} is not what a run writes down: it names no model or no algorithm")
        return tables

    @property
    def in_4bit(self) -> bool:
        """True if the frozen weights of the run are quantized."""
        lora = self.config_tables.get("lora")
        return isinstance(lora, dict) and lora.get("load_in_4bit") is True

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.run_dir / CHECKPOINTS_FOLDER

    @property
    def architecture(self) -> Path:
        """The folder with the config and the tokenizer of its model."""
        return self.run_dir / ARCHITECTURE_FOLDER

    @property
    def from_checkpoint(self) -> bool:
        """True if the weights are a checkpoint's, which has neither architecture nor tokenizer."""
        return self.step is not None or not self.has_model

    def whole_checkpoints(self) -> list[str]:
        """The names of the complete checkpoints, ascending.

        Raises:
            MachineError: if they may not be read.
        """
        with faults_of(self.checkpoints):
            there = sorted(self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []
            named = [path for path in there if CHECKPOINT_NAME.fullmatch(path.name)]
            return [path.name for path in named if (path / MANIFEST_FILE).is_file()]


@dataclass(frozen=True)
class ModelSource:
    """The source that a model's name refers to.

    >>> locate_model("runs/arithmetic_grpo-001")  # finished
    ModelSource(kind=ModelKind.FOLDER, name="/home/me/runs/arithmetic_grpo-001/model", origin=Origin(...))
    """

    kind: ModelKind
    name: str  # valid in any working directory: an absolute path without symbolic links, or a hub or embedded name
    origin: Origin | None = None  # the run of covey that it belongs to

    @property
    def path(self) -> Path:
        """The folder or the GGUF file; not for the embedded model and hub names."""
        return Path(self.name)

    @property
    def description(self) -> Path | None:
        """The folder with the model's config and tokenizer in Hugging Face's layout, or None if it is unknown."""
        if self.kind in (ModelKind.RUN, ModelKind.CHECKPOINT):
            assert self.origin is not None
            return self.origin.architecture
        return self.path if self.kind is ModelKind.FOLDER else None


def locate_model(model: str) -> ModelSource:
    """Resolve a model's name from names in the file system, without opening weights or asking a hub.

    Args:
        model: an embedded model's name, a path (relative, absolute, with `~` or through links), `RUN@STEP` or
            `RUN@best` for a checkpoint of a run, or a hub name.

    Raises:
        ConfigError: if there is no loadable model; one line that names the fix.
    """
    if model in EMBEDDED_MODELS:
        return ModelSource(ModelKind.EMBEDDED, model)
    path = _path_of(model)
    origin = find_origin(model)
    if origin is not None:
        check_origin(origin, model)
        if origin.step is not None:
            return ModelSource(ModelKind.CHECKPOINT, str(origin.checkpoints / path.name), origin)
        if origin.from_checkpoint:
            return ModelSource(ModelKind.RUN, str(origin.run_dir), origin)
        return ModelSource(ModelKind.FOLDER, str(origin.run_dir / MODEL_FOLDER), origin)
    try:
        if path.is_dir():
            _check_model_folder(path, model)
            return ModelSource(ModelKind.FOLDER, str(path))
        if path.is_file():
            _check_gguf_name(path, model)
            return ModelSource(ModelKind.GGUF, str(path))
        if unusual_kind(path):
            kind = unusual_kind(path)
            raise ConfigError(f"model: {model} is {kind}; give a model's folder, a hub name or a .gguf file")
    except OSError as error:
        raise path_error(error, f"model: {model} cannot be read", path) from error
    _check_hub_name(model)
    return ModelSource(ModelKind.HUB, model)


def find_origin(model: str) -> Origin | None:
    """The run that `model` names by its folder, its model/ or one of its checkpoints; None if it names no run."""
    if model in EMBEDDED_MODELS:
        return None
    path = _path_of(model)
    try:
        if (path / CONFIG_FILE).is_file() and not (path / MODEL_CONFIG_FILE).is_file():
            return Origin(path)
        if path.name == MODEL_FOLDER and (path.parent / CONFIG_FILE).is_file():
            return Origin(path.parent)
        named = CHECKPOINT_NAME.fullmatch(path.name)
        if named and path.parent.name == CHECKPOINTS_FOLDER and (path.parents[1] / CONFIG_FILE).is_file():
            return Origin(path.parents[1], int(named[1]))
    except OSError as error:
        raise path_error(error, f"model: {model} cannot be read", path) from error
    return None


def check_origin(origin: Origin, model: str) -> None:
    """Refuse a run without a model to load.

    Raises:
        ConfigError: for a run on an environment, one that saved nothing yet, a checkpoint that is not there, a run
            whose architecture is missing.
    """
    run_dir, whole = origin.run_dir, origin.whole_checkpoints()
    if not origin.from_checkpoint:
        return
    _ = origin.config_tables  # refuses a run without a language model
    name = _path_of(model).name
    if origin.step is not None and name not in whole:
        kept = f"it has {', '.join(whole)}" if whole else "it has none"
        raise ConfigError(f"model: the run in {_shown(run_dir)} has no checkpoint {name}: {kept}")
    if not whole:
        raise ConfigError(
            f"model: the run in {_shown(run_dir)} has saved neither its model nor a checkpoint yet: go on with it by "
            f"{command('train', '--resume', _shown(run_dir))}"
        )
    if not (origin.architecture / MODEL_CONFIG_FILE).is_file():
        raise ConfigError(
            f"model: {_shown(origin.architecture)} has no {MODEL_CONFIG_FILE}, so the checkpoints of this run have no "
            "architecture: copy config.json and the tokenizer's files of the model that it began with there"
        )


def _shown(path: Path) -> Path:
    """An absolute path for a message: relative if it is below the working directory."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _path_of(model: str) -> Path:
    """`model` as an absolute path without symbolic links, which need not exist; `RUN@STEP` is the path of a checkpoint.

    Raises:
        ConfigError: if it is not a valid path, or `RUN@best` of a run that has no best checkpoint.
    """
    path = user_path(model, "model: ").resolve()
    match = RUN_AT_STEP.fullmatch(path.name)
    if match is None or os.path.lexists(path):
        return path
    run_dir = path.parent / match[1]
    if match[2] == "best" and not (run_dir / CONFIG_FILE).is_file():
        return path
    step = best_step(run_dir) if match[2] == "best" else int(match[2])
    return run_dir / CHECKPOINTS_FOLDER / f"step-{step:08d}"


def best_step(run_dir: Path) -> int:
    """The step of the best checkpoint of a run.

    Raises:
        ConfigError: if the run does not keep it, or had no evaluation yet.
    """
    path = run_dir / CHECKPOINTS_FOLDER / BEST_FILE
    try:
        step = json.loads(read_below(path.parent, path.name))["step"]
        if type(step) is int and step > 0:
            return step
    except FileNotFoundError:
        raise ConfigError(
            f"model: the run in {_shown(run_dir)} has no best checkpoint: a run keeps it with checkpoint.best = true, "
            "from its first evaluation on"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise path_error(error, f"model: {path} cannot be read", path) from error
    raise ConfigError(f"model: {path} names no step: name the step as RUN@STEP")


def _check_model_folder(path: Path, model: str) -> None:
    """Refuse a folder without a model; the message names the folder to use."""
    parent_is_run = (path.parent / CONFIG_FILE).is_file()
    if path.name == CRITIC_FOLDER and parent_is_run:
        raise ConfigError(f"model: {model} is the critic of a run, no language model: name the run, {path.parent}")
    if path.name == CHECKPOINTS_FOLDER and parent_is_run:
        whole = Origin(path.parent).whole_checkpoints()
        kept = f"name one of them ({', '.join(whole)}) or the run" if whole else "name the run"
        raise ConfigError(f"model: {model} is the folder of a run's checkpoints: {kept}, {path.parent}")
    if (path / MODEL_CONFIG_FILE).is_file():
        return
    if (path / ADAPTER_CONFIG_FILE).is_file():
        raise ConfigError(
            f"model: {model} is an adapter (LoRA or another kind), no whole model: name its base model as model, and "
            "this folder as lora.adapter, or merge the two (peft: merge_and_unload, then save_pretrained)"
        )
    files = sorted(file.name for file in path.glob(f"*{GGUF_SUFFIX}"))
    if files:
        raise ConfigError(f"model: name the GGUF file itself: {path / files[0]}")
    inside = sorted(file.parent for file in path.glob(f"*/{MODEL_CONFIG_FILE}"))
    hint = f"; the folder {inside[0]} has one" if inside else ""
    raise ConfigError(f"model: the folder {model} has no {MODEL_CONFIG_FILE}, so it is not a Hugging Face model{hint}")


def _check_gguf_name(path: Path, model: str) -> None:
    """Refuse a file whose name is not that of a GGUF file; its content is checked when it is read."""
    if path.suffix.lower() == GGUF_SUFFIX:
        return
    with open(path, "rb") as file:
        if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC:
            raise ConfigError(f"model: {model} is a GGUF file under another name: rename it so that it ends with .gguf")
    belongs = (path.parent / MODEL_CONFIG_FILE).is_file()
    hint = f" (did you mean '{path.parent}'?)" if belongs else ""
    raise ConfigError(f"model: {model} is a file; give the model's folder, a hub name or a .gguf file{hint}")


def _check_hub_name(model: str) -> None:
    """Refuse a missing path that does not look like a name on the model hub."""
    path = user_path(model, "model: ")
    if model.lower().endswith(GGUF_SUFFIX):
        raise ConfigError(f"model: there is no file {model}{did_you_mean_file(path)}")
    like_path = model.startswith((".", "~", os.sep)) or model.endswith(os.sep) or model.count("/") > 1
    # A hub name's first part is a user or an organisation. If a folder is called so, a path was meant.
    if like_path or ("/" in model and Path(model.split("/")[0]).is_dir()):
        raise ConfigError(f"model: there is no folder {model}{did_you_mean_file(path)}")
    suggestion = did_you_mean(model.lower(), list(EMBEDDED_MODELS))
    if not HUB_NAME.fullmatch(model) or ("/" not in model and suggestion):
        raise ConfigError(f"model: {model!r} is not an embedded model, folder, .gguf file or hub name{suggestion}")


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


@table(frozen=True)
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
    load_in_4bit: bool = config_field(
        False,
        "the frozen weights of linear layers are in 4 bits (QLoRA: NF4 with double quantization); needs covey[4bit]",
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


def check_four_bit() -> None:
    """Raises ConfigError if the package that quantizes weights is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError('lora.load_in_4bit needs the package bitsandbytes: pip install "covey[4bit]"')


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
