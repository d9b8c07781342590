"""The dtype of long sums on a device."""

from __future__ import annotations

import torch
from torch import Tensor

_WITHOUT_FP64 = ("mps",)  # kinds of device whose tensors cannot be fp64: Apple's GPUs


def widest(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on a device without it."""
    return torch.float32 if device.type in _WITHOUT_FP64 else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the widest dtype of its device."""
    return tensor.to(widest(tensor.device))
