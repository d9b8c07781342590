"""Recomputation of decoder layers in the backward pass (gradient checkpointing, arXiv 1604.06174).

Autograd keeps the input of a layer instead of all activations within it. The backward pass computes the layer again
from its input, so it needs the time of a further forward pass, and the activations of one layer at a time. The bits are
the same.

transformers has this too, but only for modules in training mode, in which some layers apply dropout.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.config import ConfigError
from covey.llm.model.fused_layers import PendingResidual
from covey.llm.model.lora import with_present_adapter

CACHES = ("past_key_values", "layer_past")  # names of a layer's argument for keys and values of earlier tokens


def recompute_layers(module: nn.Module) -> None:
    """Let the decoder layers of `module` be computed again in the backward pass. Called once, after `fuse`.

    Raises:
        ConfigError: if transformers does not mark the layers of this architecture.
    """
    layers = decoder_layers(module)
    if not layers:
        raise ConfigError(
            f"the layers of {type(module).__name__} cannot be recomputed: leave update.recompute out, or choose "
            "another model"
        )
    for layer in layers:
        # Not the bound method, because a copy of the module would compute with the weights of this one.
        function = layer.forward.__func__  # type: ignore[attr-defined]
        layer.forward = MethodType(partial(_recomputed, forward=function), layer)  # type: ignore[method-assign]


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that transformers marks for recomputation, without those within others; empty for some models."""
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if layer not in inner]


def _recomputed(
    layer: nn.Module, hidden: Tensor | PendingResidual, *args: Any, forward: Callable[..., Any], **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(layer, hidden, *args, **kwargs)
    is_pending = isinstance(hidden, PendingResidual)
    # Some models make a cache that nobody asked for; the second pass would append its keys to those of the first.
    kwargs |= {name: None for name in CACHES if name in kwargs}

    def compute(*parts: Any) -> Any:
        pending, rest = (PendingResidual(*parts[:2]), parts[2:]) if is_pending else (parts[0], parts[1:])
        return forward(layer, pending, *rest, **kwargs)

    inputs = hidden if is_pending else (hidden,)
    recomputed = with_present_adapter(layer, compute)
    return checkpoint(recomputed, *inputs, *args, use_reentrant=False, preserve_rng_state=False)


def input_bytes(hidden: int, itemsize: int, *, fused: bool) -> int:
    """Bytes that are kept of one token as the input of a layer; `itemsize`: bytes of an activation.

    Fused layers take the residual stream, in fp32, and the output of the layer before.
    """
    return hidden * (itemsize + (torch.float32.itemsize if fused else 0))
