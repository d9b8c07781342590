"""Memory of low-rank adapters (LoRA): their numbers, and what autograd keeps with frozen weights.

A frozen linear layer needs no input for its backward pass. An adapted one needs its input for the gradient of A and the
low-rank product for that of B.
"""

from __future__ import annotations

from covey.config import RunConfig
from covey.config.lora import resolved
from covey.llm.memory.dimensions import Dimensions, LinearShape
from covey.llm.model import fused_layers
from covey.llm.model.lora import choose_targets

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # autograd keeps it once
KEPT_BY_ATTENTION = "o_proj"  # covey's attention keeps its result, which is the input of this layer


def adapted_shapes(size: Dimensions, config: RunConfig) -> list[LinearShape]:
    """The linear layers that have an adapter; none without LoRA.

    Raises:
        ConfigError: if a target is no linear layer, or the adapter with which training begins cannot be read.
    """
    if not config.lora.is_used:
        return []
    targets = resolved(config.lora).targets
    chosen = set(choose_targets([one.path for one in size.linear], targets, size.architecture))
    return [one for one in size.linear if one.path in chosen]


def adapter_parameters(size: Dimensions, config: RunConfig) -> int:
    """The numbers of A and B of all layers; 0 without LoRA."""
    shapes = adapted_shapes(size, config)
    return resolved(config.lora).rank * sum(one.inputs + one.outputs for one in shapes)


def trained_parameters(size: Dimensions, config: RunConfig) -> int:
    """The numbers that the policy's optimizer holds."""
    return adapter_parameters(size, config) if config.lora.is_used else size.parameters


def reference_parameters(size: Dimensions, config: RunConfig) -> int:
    """The numbers that the reference has besides those of the policy: a copy of the model, or of the adapter."""
    if not config.lora.is_used:
        return size.parameters
    return adapter_parameters(size, config) if config.copies_reference_adapter else 0


def frozen_parameters(size: Dimensions, config: RunConfig) -> int:
    """The numbers that are not trained: of the reference, and with LoRA of the model."""
    return reference_parameters(size, config) + (size.parameters if config.lora.is_used else 0)


def activation_change(
    size: Dimensions, config: RunConfig, tokens: int, itemsize: int, *, fused: bool, recomputed: bool
) -> int:
    """Bytes that autograd keeps with LoRA beyond `activation_bytes`, below 0 if it keeps less; 0 without LoRA.

    Args:
        tokens: of a microbatch.
        itemsize: bytes of an activation.
        fused: whether covey's kernels compute the layers.
        recomputed: whether layers keep their inputs alone; the change is that of one layer then.
    """
    if not config.lora.is_used:
        return 0
    shapes = adapted_shapes(size, config)
    products = len(shapes) * resolved(config.lora).rank
    unneeded = _unneeded_inputs(size, {one.path for one in shapes}, fused=fused)
    # torch's RMSNorm keeps its normalised input for the gradient of its weight, covey's computes it again.
    has_frozen = size.has_rms_norm and not fused
    head_norms = size.query + size.key_value if size.has_head_norms else 0
    of_norms = size.layers * (2 * size.hidden + head_norms) if has_frozen else 0
    change = (products - unneeded - of_norms) * itemsize
    last = size.hidden * itemsize if has_frozen else 0
    if recomputed:
        return tokens * (change // size.layers - last)
    # The embeddings are frozen, so the first norm has no backward pass.
    first = fused_layers.residual_norm_bytes(size.hidden) if fused else _norm_input_bytes(size, itemsize)
    return tokens * (change - last - first)


def _norm_input_bytes(size: Dimensions, itemsize: int) -> int:
    return size.hidden * (4 if size.has_rms_norm else itemsize)


def _unneeded_inputs(size: Dimensions, adapted: set[str], *, fused: bool) -> int:
    """The width of all inputs of linear layers that no adapted layer reads."""
    inputs = {_input_of(one.path): one.inputs for one in size.linear if not (fused and KEPT_BY_ATTENTION in one.path)}
    needed = {_input_of(path) for path in adapted}
    return sum(width for name, width in inputs.items() if name not in needed)


def _input_of(path: str) -> tuple[str, ...]:
    """A key of a layer's input."""
    parent, _, name = path.rpartition(".")
    return parent, *next((names for names in SAME_INPUT if name in names), (name,))
