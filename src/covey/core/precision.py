"""The dtype of long sums on a device."""

import torch
from torch import Tensor

_WITHOUT_FP64 = ("mps",)  # kinds of device whose tensors cannot be fp64: Apple's GPUs


def widest(device: torch.device) -> torch.dtype:
    """widest(device) = fp32 on Apple's GPUs, which have no fp64, else fp64."""
    return torch.float32 if device.type in _WITHOUT_FP64 else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """widened(x) = x in the widest dtype of its device."""
    return tensor.to(widest(tensor.device))
