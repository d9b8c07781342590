"""Adds low-rank adapters (LoRA, arXiv 2106.09685) to a model through peft, selects one, reads and writes them; the
frozen weights in 4 bits.

A model can have several adapters of the same layers: that of the policy, of a critic, of a reference. One of them, or
none, is in use at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN  # peft reads it too
from transformers.pytorch_utils import Conv1D

from covey.config import ConfigError, LoRAConfig
from covey.config.files import path_error, raise_fault, read_json
from covey.config.model_sources import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, check_four_bit
from covey.runtime.distributed import WHOLE, Weights
from covey.runtime.rng import ADAPTING, uniforms

# ---- frozen weights in 4 bits ----

# NormalFloat4 with double quantization (QLoRA, arXiv 2305.14314), by bitsandbytes.
#
# A block of 64 weights has 4 bits for each and one scale; the scales of 256 blocks have 8 bits each and one scale. A
# layer computes with the weights that these stand for, in the dtype in which the model was loaded: whoever reads
# `weight`, such as a decoder that copies or merges it, gets the same numbers as the forward and the backward pass.
#
# Shapes: M outputs, N inputs.

BLOCK, SCALES = 64, 256  # weights with one scale, scales with one scale
PACKED = "packed"  # name of the parameter in place of the weight


def packed_bytes(weights: int) -> int:
    """Bytes of so many weights and of their scales."""
    return weights // 2 + weights // BLOCK + weights // (BLOCK * SCALES) * 4


class NF4Linear(nn.Linear):
    """x -> x W' + b with W in NF4, for a frozen layer."""

    like: Tensor  # empty, of the dtype of the weights; converted with the tensors of the model

    def __init__(self, layer: nn.Linear, device: torch.device, checksum: str) -> None:
        """
        Args:
            layer: the layer to quantize, whose bias is kept.
            device: where it is quantized and computes.
            checksum: of its weight before.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.checksum = layer.in_features, layer.out_features, checksum
        weight = layer.weight.detach().to(device)
        # One row of whole blocks: on a CPU bitsandbytes 0.50 takes wrong scales if a block crosses the end of a row.
        row = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK))
        packed, self.state = _functional().quantize_4bit(
            row, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("like", weight.new_empty(0), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A new tensor [M, N] with the weights that the 4 bits stand for."""
        row: Tensor = _functional().dequantize_4bit(self.packed.detach(), self.state)
        numbers = self.out_features * self.in_features
        return row.flatten()[:numbers].view(self.out_features, self.in_features).to(self.like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self)

    def dense(self, weight_MN: Tensor) -> nn.Linear:
        """A layer with the same bias and another weight."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight, layer.bias = nn.Parameter(weight_MN), self.bias
        return layer


def stored(layer: nn.Linear) -> Tensor:
    """A tensor with the dtype and device of a layer's weight, which is not computed."""
    return layer.like if isinstance(layer, NF4Linear) else layer.weight


class _Product(torch.autograd.Function):
    """x W' + b. The backward pass computes W again, and has a gradient of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return d @ ctx.layer.weight, None


def _functional() -> Any:
    """bitsandbytes.functional, imported at first use, because it is an extra and takes a second."""
    check_four_bit()
    return import_module("bitsandbytes.functional")


# It warns of a missing package whose kernel is not used, also when peft imports it, on every rank.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

T = TypeVar("T")
POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"  # names of adapters
PREFIX = "base_model.model."  # of the names in peft's files
LINEAR = (nn.Linear, NF4Linear, Conv1D)
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


class AdapterWeights(Weights):
    """Weights of a model with one of its adapters, or with none; implements `covey.runtime.distributed.Weights`.

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
        ConfigError: if a target is not a layer that an adapter can be added to.
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
    except Exception as error:  # of a model's code, for an input of another shape
        raise_fault(error)
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
                f"lora.targets: {target!r} is not a linear layer of {model} that an adapter can be added to: "
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
    save_base(base, adapter, folder)


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
    """Replace the adapted and the quantized layers of a model by linear layers with merged weights. All weights are
    trainable then.
    """
    for path, layer in (quantized_layers(module) | adapted_layers(module)).items():
        base, weight = base_of(layer), merged_weight(layer)
        if isinstance(base, NF4Linear):
            base = base.dense(weight)
        else:
            base.weight = nn.Parameter(weight)
        module.set_submodule(path, base)
    del module.peft_config
    module.requires_grad_(True)


P = ParamSpec("P")

MERGED_ROWS = 256  # rows of a weight that are merged with an adapter at a time


class Factors(NamedTuple):
    """The adapter that a layer uses at present."""

    a_RN: Tensor
    b_MR: Tensor
    scaling: float


def is_adapted(layer: nn.Module) -> bool:
    """True for a layer of peft around a frozen linear layer."""
    return hasattr(layer, "base_layer")


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The adapted layers of a model by path."""
    return {path: layer for path, layer in module.named_modules() if is_adapted(layer)}


def quantized_layers(module: nn.Module) -> dict[str, NF4Linear]:
    """The quantized layers of a model without an adapter, by path."""
    adapted = adapted_layers(module)
    parts = module.named_modules()
    return {path: part for path, part in parts if isinstance(part, NF4Linear) and not _inside(path, adapted)}


def quantizable_layers(module: PreTrainedModel) -> dict[str, nn.Linear]:
    """The layers that `quantize` replaces, by path."""
    found = ((path, module.get_submodule(path)) for path in adaptable_paths(module))
    return {path: layer for path, layer in found if type(layer) is nn.Linear}


def quantize(module: PreTrainedModel, device: torch.device) -> None:
    """Replace the linear layers that an adapter may be added to by quantized ones on a device, one after the other.

    Raises:
        ConfigError: if there is no such layer, or bitsandbytes is not installed.
    """
    quantized_share(module)
    for path in quantizable_layers(module):
        layer: Any = module.get_submodule(path)
        module.set_submodule(path, NF4Linear(layer, device, _checksum(layer.weight)))


def quantized_share(module: PreTrainedModel) -> str:
    """A line for the user about the layers of a model, which may be without weights, that `quantize` replaces.

    Raises:
        ConfigError: if there is no such layer.
    """
    layers = quantizable_layers(module).values()
    if not layers:
        raise ConfigError(
            f"lora.load_in_4bit: {type(module).__name__} has no layers of torch.nn.Linear below its output layer, and "
            "others are not quantized: remove lora.load_in_4bit, or choose another model"
        )
    share = sum(layer.weight.numel() for layer in layers) / sum(one.numel() for one in module.parameters())
    return f"{share:.0%} of the frozen weights, in {len(layers)} linear layers, are in 4 bits; no others are quantized"


def base_of(layer: Any) -> Any:
    """The layer without its adapter."""
    return getattr(layer, "base_layer", layer)


def factors_of(layer: Any) -> Factors | None:
    """The adapter that a layer uses at present; None if it has none, or adapters are off."""
    if not is_adapted(layer) or layer.disable_adapters:
        return None
    (name,) = layer.active_adapters
    return Factors(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Context manager after which a module uses the adapter that it used before."""
    before = _selection(module)
    try:
        yield
    finally:
        _restore(before)


def with_present_adapter(module: nn.Module, compute: Callable[P, T]) -> Callable[P, T]:
    """`compute`, which reads the module, with the adapter that the module uses now, at whatever time it is called.

    A backward pass computes parts of a forward pass again, and the module may use another adapter then.
    """
    present = _selection(module)
    if not present:
        return compute

    def computed(*arguments: P.args, **options: P.kwargs) -> T:
        with restored(module):
            _restore(present)
            return compute(*arguments, **options)

    return computed


Selection = list[tuple[Any, Any, bool]]  # a layer, the names of its adapters in use, whether adapters are off


def _selection(module: nn.Module) -> Selection:
    layers = adapted_layers(module).values()
    return [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]


def _restore(selection: Selection) -> None:
    # peft's own methods set `requires_grad` too, on which optimizers and autograd's graphs rely.
    for layer, active, off in selection:
        layer._active_adapter, layer._disable_adapters = active, off


def merged_weight(layer: Any, whole: Tensor | None = None) -> Tensor:
    """W + s B A, computed in fp32 and rounded once; W itself without an adapter. It is [N, M] if W is (GPT-2).

    `whole` is W if the layer has only this rank's rows of it.
    """
    weight: Tensor = base_of(layer).weight.detach() if whole is None else whole
    if factors_of(layer) is None:
        return weight
    merged = torch.empty_like(weight)
    _merge(merged, weight, layer)
    return merged


def joined_weights(*layers: Any) -> Tensor:
    """The concatenated weights [M, N] of linear layers with the same inputs, merged with their adapters.

    Only tensors of a few MB are allocated beside the result, because copies of whole weights leave holes in the heap. A
    single weight without an adapter is not copied: that of an output layer may be as large as ten other layers.
    """
    weights = [base_of(layer).weight.detach() for layer in layers]
    if len(layers) == 1 and factors_of(layers[0]) is None:
        return weights[0]
    joined = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1])
    for part, weight, layer in zip(joined.split([len(weight) for weight in weights]), weights, layers, strict=True):
        _merge(part, weight, layer)
    return joined


@torch.no_grad()
def _merge(merged: Tensor, weight: Tensor, layer: Any) -> None:
    """Write W + s B A to `merged`, MERGED_ROWS rows at a time; W without an adapter."""
    factors = factors_of(layer)
    if factors is None:
        merged.copy_(weight)
        return
    exact = torch.promote_types(weight.dtype, torch.float32)
    a_RN, b_MR = (factor.detach().to(exact) for factor in factors[:2])
    left, right = (a_RN.T, b_MR.T) if layer.fan_in_fan_out else (b_MR, a_RN)
    for begin in range(0, len(weight), MERGED_ROWS):
        rows = slice(begin, begin + MERGED_ROWS)
        merged[rows] = torch.add(weight[rows].to(exact), left[rows] @ right, alpha=factors.scaling)


def merged_tensors(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of a model by name, and their names, as they are after its adapter was merged into them. The
    weights of one layer at a time are computed.
    """
    adapted = adapted_layers(module)
    changed = quantized_layers(module) | adapted
    for name, tensor in tensors:
        path, _, field = _name_in_base(name).rpartition(".")
        if path in changed and field in ("weight", PACKED):
            yield f"{path}.weight", merged_weight(changed[path], tensor if field == "weight" else None)
        elif not _is_factor(name, adapted):
            yield f"{path}.{field}" if path else field, tensor


def base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model without its adapters, and their names without them."""
    layers = adapted_layers(module)
    for name, parameter in module.named_parameters():
        if not _is_factor(name, layers):
            yield _name_in_base(name), parameter


def all_factors(module: nn.Module) -> set[nn.Parameter]:
    """The matrices A and B of all adapters of a model."""
    layers = adapted_layers(module)
    return {parameter for name, parameter in module.named_parameters() if _is_factor(name, layers)}


def _name_in_base(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _is_factor(name: str, layers: Mapping[str, Any]) -> bool:
    return name.partition(".lora_")[0] in layers


BASE_FILE = "base.json"  # beside an adapter's config
QUANTIZATION = "nf4, double quantization"


class BaseIdentity:
    """The frozen weights of a model, to which its adapters belong."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @cached_property
    def checksum(self) -> str:
        """The checksum of the weights, computed once. The first to read it must do so before the ranks divide them."""
        return checksum_of_base(self.model)


def checksum_of_base(module: PreTrainedModel) -> str:
    """SHA-256 of the names and the weights of a model without its adapters.

    The weights are rounded to bf16 before, so the checksum is the same in every precision in which they are loaded.
    That of a quantized weight is the one that it had before.
    """
    quantized = {part.packed: part.checksum for part in module.modules() if isinstance(part, NF4Linear)}

    def line(name: str, parameter: nn.Parameter) -> str:
        if parameter in quantized:
            return f"{name.removesuffix(PACKED)}weight {quantized[parameter]}"
        return f"{name} {_checksum(parameter)}"

    with ThreadPoolExecutor() as executor:
        lines = executor.map(line, *zip(*base_parameters(module), strict=True))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _checksum(weight: Tensor) -> str:
    rounded = weight.detach().to(torch.bfloat16).cpu().contiguous()
    return f"{tuple(weight.shape)} {hashlib.sha256(rounded.view(torch.int16).numpy().data).hexdigest()}"


def save_base(name: str, adapter: Adapter, folder: Path) -> None:
    """Write the name and the checksum of an adapter's base model into a folder, and how it was quantized."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"model": name, "sha256": adapter.base.checksum}
    fields |= {"quantization": QUANTIZATION} if adapter.lora.load_in_4bit else {}
    (folder / BASE_FILE).write_text(json.dumps(fields) + "\n", encoding="utf-8")


def check_base(folder: Path, checksum: str, fix: str) -> None:
    """Refuse a base model with other weights than those whose checksum `save_base` wrote.

    Raises:
        ConfigError: if they differ, with the fix, or if the file is damaged or missing.
    """
    path = folder / BASE_FILE
    saved = read_json(path, strict=False)
    if not isinstance(saved, dict) or not isinstance(saved.get("sha256"), str):
        raise ConfigError(f"{path} is damaged: it must name the checksum of the adapter's base model")
    if saved["sha256"] != checksum:
        raise ConfigError(
            f"the model's weights are not those of {saved.get('model')} to which the adapter of {path} belongs: {fix}"
        )
