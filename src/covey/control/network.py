"""A small multilayer perceptron, in torch for learning and in NumPy for acting, on the same memory.

Shape legend: N observations, D numbers in one, O outputs, B rollouts, T decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from covey.config import ConfigError
from covey.control.normaliser import RunningMoments
from covey.data import Batch

Array = NDArray[np.float32]


class Tanh(torch.autograd.Function):
    """tanh in place, by NumPy: 14 times as fast as torch's on a core with AVX-512 (NumPy 2.4, torch 2.13, 100,000
    numbers in float32), which nearly halves the time of an update."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor) -> Tensor:
        _tanh(x_NH.numpy())
        ctx.mark_dirty(x_NH)
        ctx.save_for_backward(x_NH)
        return x_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (out_NH,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grads[0], out_NH)


def _tanh(x_NH: NDArray[Any]) -> None:
    np.tanh(x_NH, out=x_NH)


def _relu(x_NH: NDArray[Any]) -> None:
    np.maximum(x_NH, 0, out=x_NH)


# For learning and for acting; both work in place.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[NDArray[Any]], None]]] = {
    "tanh": (Tanh.apply, _tanh),
    "relu": (torch.relu_, _relu),
}


class Network(nn.Module):
    """[N, D] -> [N, O]: hidden layers of the given widths, a linear head.

    Weights are orthogonal with gain sqrt 2 (the head's: `head_gain`), biases zero: Andrychowicz et al. (2021),
    arXiv 2006.05990, section 3.2. float32 on the CPU.
    """

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int, *, activation: str, head_gain: float, seed: int
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        generator = torch.Generator().manual_seed(seed)
        widths = [inputs, *hidden, outputs]
        self.linears: list[nn.Linear] = []
        for index, (before, after) in enumerate(pairwise(widths)):
            layer = nn.utils.skip_init(nn.Linear, before, after)  # its own would draw from the global generator
            gain = head_gain if index == len(hidden) else 2**0.5
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)
            self.linears.append(layer)
        self.layers = nn.ModuleList(self.linears)

    def forward(self, x_ND: Tensor) -> Tensor:
        activate, _ = ACTIVATIONS[self.activation]
        *hidden, head = self.linears
        for layer in hidden:
            x_ND = activate(linear(x_ND, layer.weight, layer.bias))
        return linear(x_ND, head.weight, head.bias)


class FastForward:
    """A network's forward pass without autograd, for a few rows: work arrays made once and as few calls as can be.

    It looks at the memory of the parameters themselves, so it always has the current ones, as long as they are changed
    in place (optimizers and `load_state_dict` do). The products are torch's, so that they keep to its number of
    threads; the rest is NumPy's.
    """

    def __init__(self, network: Network, normaliser: RunningMoments | None) -> None:
        self.network = network
        self.normaliser = normaliser
        self._look()

    def __call__(self, observation_ND: Array) -> Array:
        """float32 [N, D] -> [N, O], a work array that the next call overwrites."""
        if len(observation_ND) != self._rows:
            self._make_room(len(observation_ND))
        if self.normaliser is None:
            np.copyto(self._input_ND, observation_ND)
        else:
            self.normaliser.normalise(observation_ND, out=self._input_ND)
        for bias, before, weight, after, activate, array in self._hidden:
            torch.addmm(bias, before, weight, out=after)
            activate(array)
        bias, before, weight, after, _, array = self._head
        torch.addmm(bias, before, weight, out=after)
        return array

    def __getstate__(self) -> dict[str, Any]:
        # A copy gets parameters of its own and must look at those.
        return {"network": self.network, "normaliser": self.normaliser}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look()

    def _look(self) -> None:
        self._views = [(layer.bias.detach(), layer.weight.detach().t()) for layer in self.network.linears]
        self._rows = -1

    def _make_room(self, rows: int) -> None:
        self._rows = rows
        _, activate = ACTIVATIONS[self.network.activation]
        before = torch.empty(rows, self.network.linears[0].in_features)
        self._input_ND = before.numpy()
        layers = []
        for bias, weight in self._views:
            after = torch.empty(rows, len(bias))
            layers.append((bias, before, weight, after, activate, after.numpy()))
            before = after
        *self._hidden, self._head = layers


class DecidedObservations:
    """The observations that the decided columns of a batch rest on, normalised, as one tensor.

    The passes of an update go over the same rows again and again: the last answer is kept.
    """

    def __init__(self, normaliser: RunningMoments | None) -> None:
        self.normaliser = normaliser
        self._context: tuple[Any, ...] = ()
        self._mask_BT = torch.empty(0, dtype=torch.bool)
        self._mean_D: NDArray[np.float64] | None = None
        self._answer = (torch.empty(0), torch.empty(0, dtype=torch.int64))

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """observation_ND, and place_N: where in the flattened [B * T] each of them stands."""
        mean_D = None if self.normaliser is None else self.normaliser.mean_D
        known = len(batch.context) == len(self._context) and all(map(is_, batch.context, self._context))
        if not (known and mean_D is self._mean_D and torch.equal(batch.mask_BT, self._mask_BT)):
            self._answer = self._gather(batch)
            self._context, self._mask_BT, self._mean_D = batch.context, batch.mask_BT.clone(), mean_D
        return self._answer

    def _gather(self, batch: Batch) -> tuple[Tensor, Tensor]:
        place_N = np.flatnonzero(batch.mask_BT.numpy())
        lengths_B = np.array([len(row) for row in batch.context])
        # Row b begins at place b * T of the padded table, and at the sum of the lengths before it when joined.
        shift_B = np.cumsum(lengths_B) - lengths_B - np.arange(len(lengths_B)) * batch.mask_BT.shape[1]
        source_N = place_N + shift_B[place_N // batch.mask_BT.shape[1]]
        observation_ND = np.concatenate(batch.context)[source_N]
        if self.normaliser is not None:
            observation_ND = self.normaliser.normalise(observation_ND, out=observation_ND)
        return torch.from_numpy(observation_ND), torch.from_numpy(place_N)


def scatter(value_N: Tensor, place_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Values of decided columns ([N] or [N, V]) in their places of [B, T] or [B, T, V]; 0 elsewhere."""
    if len(value_N) == mask_BT.numel():
        return value_N.view(*mask_BT.shape, *value_N.shape[1:])
    blank = value_N.new_zeros(mask_BT.numel(), *value_N.shape[1:])
    return blank.index_copy(0, place_N, value_N).view(*mask_BT.shape, *value_N.shape[1:])
