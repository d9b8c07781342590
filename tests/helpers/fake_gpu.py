"""`covey` on a GPU that does not exist: what computes is the CPU, and what a GPU refuses is refused.

    python -m helpers.fake_gpu train tiny.toml

Tensors sent to the device say that they are there, and torch's own rules are kept: an operation takes tensors of one
device alone (a number may come from the CPU, and so may an index), and none is in fp64.

In Python the device is Apple's, "mps"; below Python it is a second CPU, because this torch can name no GPU there.
Speed, memory and a GPU's arithmetic are not pretended: tests of those need a GPU.
"""

from __future__ import annotations

import sys
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU, GPU = torch.device("cpu"), torch.device("mps", 0)
BELOW = torch.device("cpu", 1)
MIXED = ("aten::_to_copy", "aten::copy_", "aten::to.", "aten::index.", "aten::index_put")  # may take tensors of both


class OnGPU(Tensor):
    """A tensor that says it is on the GPU, and one on the CPU that has its numbers."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnGPU:
        if numbers.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{GPU} has no float64")
        told = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=CPU, dispatch_device=True, requires_grad=numbers.requires_grad,
        )  # fmt: skip
        told.numbers = numbers
        return told

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: OnGPU) -> None:  # torch's own would leave the old numbers
        Tensor.data.__set__(self, value)
        self.numbers = value.numbers

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = OnGPU(self.numbers.clone())
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copy, requires_grad=self.requires_grad) if is_parameter else copy
        return memo[id(self)]

    def tolist(self) -> list[Any]:
        return self.numbers.tolist()


def compute(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation, on the CPU's tensors behind those that are given."""
    if operation is torch.ops.prim.device.default:
        return BELOW if isinstance(args[0], OnGPU) else CPU
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sent = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    name = operation.name()
    there = [isinstance(tensor, OnGPU) for tensor in tensors]
    mixed = any(there) and not all(here or tensor.dim() == 0 for here, tensor in zip(there, tensors, strict=True))
    if mixed and not name.startswith(MIXED):
        raise RuntimeError(f"{name}: all tensors are expected on one device")
    to_gpu = sent[0] in (GPU, BELOW) if sent else any(there)

    def behind(leaf: Any) -> Any:
        if isinstance(leaf, OnGPU):
            return leaf.numbers
        return CPU if isinstance(leaf, torch.device) and leaf in (GPU, BELOW) else leaf

    args, kwargs = tree_map(behind, args), tree_map(behind, kwargs)
    out = operation(*args, **kwargs)
    known = {id(tensor.numbers): tensor for tensor in tensors if isinstance(tensor, OnGPU)}

    def ahead(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not to_gpu:
            return leaf.clone() if id(leaf) in known else leaf  # "moved" to where its numbers are already
        return known[id(leaf)] if id(leaf) in known else OnGPU(leaf)

    return tree_map(ahead, out)


class Computing(TorchDispatchMode):
    """For operations that make tensors of nothing."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


class Sending(TorchFunctionMode, ContextDecorator):
    """Translates the device between Python and what is below. torch makes a tensor of numbers on a device without
    asking a mode: here it is made and then sent.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = [BELOW if isinstance(word, torch.device) and word == GPU else word for word in args]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == GPU:
            kwargs["device"] = BELOW
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is Tensor.__getitem__ and isinstance(args[1], list):  # torch would make an index without numbers
            args = args[0], torch.tensor(args[1])
        return function(*args, **kwargs)


def send(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """`module.to`, which cannot turn a parameter into another class."""
    if device != GPU:
        return module
    sent: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                values = parameter.detach().to(dtype or parameter.dtype)
                on_gpu = values if isinstance(values, OnGPU) else OnGPU(values.clone())
                on_gpu = nn.Parameter(on_gpu, requires_grad=parameter.requires_grad)
                part._parameters[name] = sent.setdefault(id(parameter), on_gpu)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else OnGPU(buffer.clone())
    return module


def main() -> int:
    torch.inference_mode = torch.no_grad  # before covey is imported: tensors of that mode cannot be wrapped
    torch.backends.mps.is_available = lambda: True
    from covey.cli.main import main as covey

    nn.Module.to = send
    # torch leaves the mode that passes on `backward`, and a recomputed forward pass needs it.
    torch.autograd._engine_run_backward = Sending()(torch.autograd._engine_run_backward)
    with Computing(), Sending():
        return covey(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
