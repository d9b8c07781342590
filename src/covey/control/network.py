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
from torch.nn.functional import linear

from covey.config import ConfigError
from covey.control.normaliser import RunningMoments
from covey.data import Batch

Array = NDArray[np.float32]

# Both work in place.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Array], Array]]] = {
    "tanh": (torch.tanh_, lambda x_NH: np.tanh(x_NH, out=x_NH)),
    "relu": (torch.relu_, lambda x_NH: np.maximum(x_NH, np.float32(0), out=x_NH)),
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
        act, _ = ACTIVATIONS[self.activation]
        *hidden, head = self.linears
        for layer in hidden:
            x_ND = act(linear(x_ND, layer.weight, layer.bias))
        return linear(x_ND, head.weight, head.bias)


class FastForward:
    """A network's forward pass in plain NumPy: for a few rows, several times faster than torch.

    It looks at the memory of the parameters themselves, so it always has the current ones, as long as they are changed
    in place (optimizers and `load_state_dict` do). Returns a work array that the next call overwrites.
    """

    def __init__(self, network: Network, normaliser: RunningMoments | None) -> None:
        self.network = network
        self.normaliser = normaliser
        self._look()

    def __call__(self, observation_ND: Array) -> Array:
        """float32 [N, D] -> [N, O]."""
        x_ND = np.ascontiguousarray(observation_ND, dtype=np.float32)
        if len(x_ND) != self._rows:
            self._make_room(len(x_ND))
        if self.normaliser is not None:
            x_ND = self.normaliser.normalise(x_ND, out=self._scaled_ND)
        for weight, bias, out in self._hidden:
            np.dot(x_ND, weight, out=out)
            np.add(out, bias, out=out)
            x_ND = self._act(out)
        weight, bias, out = self._head
        np.dot(x_ND, weight, out=out)
        return np.add(out, bias, out=out)

    def __getstate__(self) -> dict[str, Any]:
        # A copy gets parameters of its own and must look at those.
        return {"network": self.network, "normaliser": self.normaliser}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look()

    def _look(self) -> None:
        _, self._act = ACTIVATIONS[self.network.activation]
        self._views = [(p.weight.detach().numpy().T, p.bias.detach().numpy()) for p in self.network.linears]
        self._rows = -1

    def _make_room(self, rows: int) -> None:
        self._rows = rows
        self._scaled_ND = np.empty((rows, self._views[0][0].shape[0]), np.float32)
        *self._hidden, self._head = [(w, b, np.empty((rows, len(b)), np.float32)) for w, b in self._views]


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
    blank = value_N.new_zeros(mask_BT.numel(), *value_N.shape[1:])
    return blank.index_copy(0, place_N, value_N).view(*mask_BT.shape, *value_N.shape[1:])
