"""Adds low-rank adapters (LoRA, arXiv 2106.09685) to a model through peft, selects one, and reads and writes them.

A model can have several adapters of the same layers: that of the policy, of a critic, of a reference. One of them, or
none, is in use at a time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN  # peft reads it too
from transformers.pytorch_utils import Conv1D

from covey.config import ConfigError, LoRAConfig
from covey.config.faults import path_error
from covey.config.lora import ADAPTER_WEIGHTS_FILE
from covey.config.model_sources import ADAPTER_CONFIG_FILE
from covey.llm.model.adapted_layers import adapted_layers, base_of, merged_weight, restored
from covey.llm.model.base_identity import BASE_FILE, BaseIdentity, check_base, save_base
from covey.runtime.rng import ADAPTING, uniforms
from covey.runtime.sharding import WHOLE, Weights, WholeWeights

T = TypeVar("T")
POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"  # names of adapters
PREFIX = "base_model.model."  # of the names in peft's files
LINEAR = (nn.Linear, Conv1D)
# Names of linear layers that peft takes for parts of the experts' one parameter, by the pattern of the model type.
NAMES_OF_EXPERTS = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}
# Layers of a Mamba mixer whose weight is read past the adapter, by torch's code or by the kernels for a GPU.
READ_BY_MAMBA = ("out_proj", "dt_proj")


@dataclass(frozen=True)
class Adapter:
    """One adapter of a model."""

    model: PreTrainedModel
    name: str
    parameters: nn.Module  # its matrices, by the names that peft's files have without their prefix
    lora: LoRAConfig
    base: BaseIdentity

    def weights(self, base: Weights = WHOLE) -> AdapterWeights:
        """The weights of the model with this adapter; `base` is the division of the frozen ones."""
        return AdapterWeights(self.model, self.name, base)


class AdapterWeights(WholeWeights):
    """Weights of a model with one of its adapters, or with none; implements `covey.runtime.sharding.Weights`.

    Every rank has the whole adapter. The ranks may divide the frozen weights.
    """

    def __init__(self, module: nn.Module, name: str | None, base: Weights = WHOLE) -> None:
        """
        Args:
            module: the model.
            name: that of the adapter; None: the model without adapters.
            base: the division of the frozen weights among the ranks.
        """
        self.module, self.name, self.base = module, name, base

    def dtype_of(self, module: nn.Module) -> torch.dtype:
        return self.base.dtype_of(module)

    def run(self, compute: Callable[[], T]) -> T:
        with in_use(self.module, self.name):
            return self.base.run(compute)

    def gathered(self) -> AbstractContextManager[None]:
        return self.base.gathered()

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        return self.base.state_dict(module)


@contextmanager
def in_use(module: nn.Module, name: str | None) -> Iterator[None]:
    """Context manager in which a model uses one of its adapters; None: the model without adapters."""
    with restored(module):
        _select(list(adapted_layers(module).values()), name)
        yield


def _select(layers: Sequence[Any], name: str | None) -> None:
    # peft's own methods set `requires_grad` too, which an optimizer and a graph of autograd rely on.
    for layer in layers:
        layer._disable_adapters = name is None
        if name is not None:
            layer._active_adapter = [name]


def add_adapter(
    module: PreTrainedModel, lora: LoRAConfig, name: str = POLICY, *, seed: int = 0, base: BaseIdentity | None = None
) -> Adapter:
    """Add an adapter, whose product is 0, to a model and freeze the model's weights.

    A is drawn uniformly from +-1 / sqrt(N) for N inputs, as torch's linear layers are, and B is 0. The adapter that was
    added first stays in use.

    Args:
        module: the model.
        lora: rank, alpha and targets.
        name: one of those above.
        seed: of A.
        base: that of the adapters which the model has already.

    Raises:
        ConfigError: if a target is no layer that an adapter can be added to.
    """
    from peft import LoraConfig, inject_adapter_in_model  # imported here, because it is an extra and takes seconds

    first = not adapted_layers(module)
    if first:
        module.requires_grad_(False)
    found = target_paths(module, lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
        target_modules=found,
        bias="none",
        fan_in_fan_out=any(isinstance(base_of(module.get_submodule(path)), Conv1D) for path in found),
        task_type="CAUSAL_LM",
    )
    others = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second adapter is meant
        inject_adapter_in_model(config, module, name, low_cpu_mem_usage=True)
    for parameter, is_trained in others:  # peft freezes the adapters that it does not use
        parameter.requires_grad_(is_trained)
    layers = adapted_layers(module)
    for number, layer in enumerate(layers.values()):
        _set_first(seed, name, number, layer)
    _select(list(layers.values()), POLICY if POLICY in next(iter(layers.values())).lora_A else name)
    return Adapter(module, name, _tree(layers, name), lora, base or BaseIdentity(module))


def target_paths(module: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The paths in `adaptable_paths` with these names; all of them if none is given.

    Raises:
        ConfigError: if a name is that of no such layer.
    """
    return choose_targets(adaptable_paths(module), targets, type(module).__name__)


def adaptable_paths(module: PreTrainedModel) -> list[str]:
    """The paths of the linear layers below the output layer, without those that peft adapts otherwise or not at all."""
    head = module.get_output_embeddings()
    adapted = adapted_layers(module)
    taken = NAMES_OF_EXPERTS.get(_MODEL_TO_CONVERSION_PATTERN.get(module.config.model_type, ""), ())
    return [
        path
        for path, part in module.named_modules()
        if (path in adapted or _is_linear(part))
        and part is not head
        and not _inside(path, adapted)
        and path.rpartition(".")[2] not in taken
        and not _read_by_mamba(module, path)
    ]


@torch.no_grad()
def _is_linear(part: nn.Module) -> bool:
    """True for a linear layer; a class derived from one, such as a router, may return anything."""
    if not isinstance(part, LINEAR) or type(part) in LINEAR:
        return isinstance(part, LINEAR)
    outputs, inputs = part.weight.shape if isinstance(part, nn.Linear) else part.weight.T.shape
    try:
        result = part(part.weight.new_zeros(2, inputs))
    except Exception:  # of a model's code, for an input of another shape
        return False
    return isinstance(result, Tensor) and result.shape == (2, outputs)


def _read_by_mamba(module: nn.Module, path: str) -> bool:
    mixer, _, name = path.rpartition(".")
    return name in READ_BY_MAMBA and {"A_log", "D"} <= module.get_submodule(mixer)._parameters.keys()


def choose_targets(linear: Sequence[str], targets: Sequence[str], model: str) -> list[str]:
    """Those of the paths of linear layers whose last parts are one of the targets; all if there is no target.

    Raises:
        ConfigError: if a target is no such layer. `model` is the name of the architecture.
    """
    if not linear:
        raise ConfigError(f"{model} has no linear layers that an adapter could be added to")
    found = {target: [path for path in linear if f".{path}".endswith(f".{target}")] for target in targets}
    for target, paths in found.items():
        if not paths:
            names = sorted({path.rpartition(".")[2] for path in linear})
            raise ConfigError(
                f"lora.targets: {target!r} is no linear layer of {model} that an adapter can be added to: "
                f"choose among {', '.join(names)}"
            )
    chosen = {path for paths in found.values() for path in paths}
    return [path for path in linear if path in chosen or not targets]


def _inside(path: str, adapted: Mapping[str, Any]) -> bool:
    return any(path.startswith(f"{outer}.") for outer in adapted)


def _set_first(seed: int, name: str, number: int, layer: Any) -> None:
    """Give A and B of the layer with this number the values with which training begins."""
    weight, first, second = base_of(layer).weight, layer.lora_A[name], layer.lora_B[name]
    inputs = first.weight.shape[1]
    purpose = (POLICY, CRITIC, REFERENCE).index(name)
    (drawn,) = uniforms(seed, purpose, number, 0, [0], stream=ADAPTING)
    generator = torch.Generator().manual_seed(int(drawn * 2**53))
    a_RN = torch.rand(first.weight.shape, generator=generator).mul_(2).sub_(1).mul_(inputs**-0.5)
    for factor, values in ((first, a_RN), (second, torch.zeros(second.weight.shape))):
        factor.weight = nn.Parameter(values.to(device=weight.device, dtype=weight.dtype))


def _tree(layers: Mapping[str, Any], name: str) -> nn.Module:
    """The factors of one adapter as modules with the layers' paths."""
    root = nn.Module()
    for path, layer in layers.items():
        at = root
        for part in path.split("."):
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.add_module("lora_A", layer.lora_A[name])
        at.add_module("lora_B", layer.lora_B[name])
    return root


@torch.no_grad()
def copy_adapter(source: Adapter, into: Adapter) -> None:
    """Copy the matrices of an adapter."""
    into.parameters.load_state_dict(source.parameters.state_dict())


def _adapter_fields(adapter: Adapter, base: str) -> dict[str, Any]:
    from peft import LoraConfig

    paths = list(adapted_layers(adapter.model))
    names = sorted({path.rpartition(".")[2] for path in paths})
    alpha = float(adapter.lora.alpha)
    is_short = target_paths(adapter.model, names) == paths
    config = LoraConfig(
        r=adapter.lora.rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
        bias="none",
        fan_in_fan_out=any(layer.fan_in_fan_out for layer in adapted_layers(adapter.model).values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    return config.to_dict() | {"target_modules": names if is_short else paths}


def save_adapter_config(adapter: Adapter, base: str, folder: Path) -> None:
    """Write the `adapter_config.json` of an adapter; `base` is the name of the base model."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = json.dumps(_adapter_fields(adapter, base), indent=2, sort_keys=True, default=str)
    (folder / ADAPTER_CONFIG_FILE).write_text(fields + "\n", encoding="utf-8")


def save_adapter(adapter: Adapter, base: str, folder: Path) -> None:
    """Write an adapter in peft's format; `base` is the name of the base model."""
    save_adapter_config(adapter, base, folder)
    tensors = {f"{PREFIX}{name}": one.detach().cpu() for name, one in adapter.parameters.named_parameters()}
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / ADAPTER_WEIGHTS_FILE)
    save_base(base, adapter.base.checksum, folder)


def saved_shapes(folder: Path) -> dict[str, list[int]]:
    """The shapes of the matrices in a folder in peft's format, from the header of their file.

    Raises:
        ConfigError: if it is damaged.
    """
    path = folder / ADAPTER_WEIGHTS_FILE
    try:
        with safe_open(path, "pt") as file:
            return {name.removeprefix(PREFIX): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise path_error(error, f"lora.adapter: {path} cannot be read: copy it again", path) from error


def check_shapes(adapter: Adapter, saved: Mapping[str, list[int]], path: Path) -> None:
    """Refuse matrices at `path` with other names or shapes than those of the adapter. Raises ConfigError."""
    needed = {name: list(one.shape) for name, one in adapter.parameters.named_parameters()}
    unlike = sorted(name for name in saved.keys() | needed.keys() if saved.get(name) != needed.get(name))
    if unlike:
        raise ConfigError(
            f"lora.adapter: {path} belongs to another model: {len(unlike)} of its matrices do not fit, such as "
            f"{unlike[0]}: set model to the adapter's base"
        )


@torch.no_grad()
def load_adapter(adapter: Adapter, folder: Path) -> None:
    """Load the matrices in a folder in peft's format.

    Raises:
        ConfigError: if they are damaged, not finite or belong to another model.
    """
    path = folder / ADAPTER_WEIGHTS_FILE
    try:
        saved = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise path_error(error, f"lora.adapter: {path} cannot be read: copy it again", path) from error
    check_shapes(adapter, {name: list(tensor.shape) for name, tensor in saved.items()}, path)
    needed = dict(adapter.parameters.named_parameters())
    if (folder / BASE_FILE).is_file():
        check_base(folder, adapter.base.checksum, "set model to the adapter's base, which that file names")
    for name, tensor in saved.items():
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"lora.adapter: {path} holds numbers that are not finite ({name}): take another adapter")
        needed[name].copy_(tensor)


@torch.no_grad()
def merge_adapter(module: PreTrainedModel) -> None:
    """Replace the adapted layers of a model by linear layers with merged weights. All weights are trainable then."""
    for path, layer in adapted_layers(module).items():
        base = base_of(layer)
        base.weight = nn.Parameter(merged_weight(layer))
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, base)
    del module.peft_config
    module.requires_grad_(True)
