"""A small multilayer perceptron in torch for training and in NumPy for acting, with shared parameters;
running mean and variance of its observations.

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

from covey.config import ConfigError, RunError
from covey.data import Batch

Array = NDArray[np.float32]


def _tanh(x_NH: NDArray[Any]) -> None:
    np.tanh(x_NH, out=x_NH)


def _relu(x_NH: NDArray[Any]) -> None:
    np.maximum(x_NH, 0, out=x_NH)


def _through_tanh(grad_NH: Tensor, h_NH: Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(grad_NH, h_NH, grad_input=grad_NH)


def _through_relu(grad_NH: Tensor, h_NH: Tensor) -> None:
    grad_NH.mul_(h_NH > 0)


# The function, and its gradient computed from its output; both in place.
ACTIVATIONS: dict[str, tuple[Callable[[NDArray[Any]], None], Callable[[Tensor, Tensor], None]]] = {
    "tanh": (_tanh, _through_tanh),
    "relu": (_relu, _through_relu),
}


class _MLPFunction(torch.autograd.Function):
    """The forward and backward pass of a `Network` as one autograd function.

    It takes about half the time of autograd's own graph, because it works in place, and NumPy's tanh is 14 times as
    fast as torch's (NumPy 2.4, torch 2.13, 100,000 numbers in float32, one core with AVX-512).
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, activation: str, *parameters: Tensor) -> Tensor:
        activate, ctx.through = ACTIVATIONS[activation]
        inputs = [x_ND]
        weights, biases = parameters[::2], parameters[1::2]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            h_NH = torch.addmm(bias, inputs[-1], weight.t())
            activate(h_NH.numpy())
            inputs.append(h_NH)
        ctx.save_for_backward(*weights, *inputs)
        return torch.addmm(biases[-1], inputs[-1], weights[-1].t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NO,) = grads
        layers = len(ctx.saved_tensors) // 2
        weights, inputs = ctx.saved_tensors[:layers], ctx.saved_tensors[layers:]
        of_parameters: list[Tensor] = []
        for layer in reversed(range(layers)):
            # For a narrow input the product is several times faster with the narrow side first.
            of_weight = grad_NO.t() @ inputs[layer] if layer else (inputs[0].t() @ grad_NO).t()
            of_parameters = [of_weight, grad_NO.sum(dim=0), *of_parameters]
            if layer:
                grad_NO = grad_NO @ weights[layer]
                ctx.through(grad_NO, inputs[layer])
        of_input = grad_NO @ weights[0] if ctx.needs_input_grad[0] else None
        return of_input, None, *of_parameters


class Uninitialised:
    """A layer whose weights the caller initialises, so that nothing is drawn from the global generator.

    `nn.utils.skip_init` does the same with tensors on the meta device, for which torch imports sympy: half a second.
    """

    def reset_parameters(self) -> None:
        """Nothing is drawn."""


class _Linear(Uninitialised, nn.Linear):
    """A linear layer."""


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
            layer = _Linear(before, after)
            gain = head_gain if index == len(hidden) else 2**0.5
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)
            self.linears.append(layer)
        self.layers = nn.ModuleList(self.linears)

    def forward(self, x_ND: Tensor) -> Tensor:
        parameters = [parameter for layer in self.linears for parameter in (layer.weight, layer.bias)]
        return _MLPFunction.apply(x_ND, self.activation, *parameters)


class NumpyMLP:
    """A network's forward pass without autograd, for a few rows, with preallocated work arrays and few calls.

    It uses views of the parameters, so it always has the current values if they are changed in place, as by optimizers
    and `load_state_dict`. Matrix products are torch's, so that they use its number of threads; the rest is NumPy's.
    """

    def __init__(self, network: Network, normaliser: RunningMeanStd | None) -> None:
        self.network = network
        self.normaliser = normaliser
        self._look()

    def __call__(self, observation_ND: Array) -> Array:
        """float32 [N, D] -> [N, O], a work array that the next call overwrites; further columns are ignored."""
        if len(observation_ND) != self._rows:
            self._make_room(len(observation_ND))
        observation_ND = observation_ND[:, : self._input_ND.shape[1]]
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look()  # a deep copy has its own parameters

    def _look(self) -> None:
        self._views = [(layer.bias.detach(), layer.weight.detach().t()) for layer in self.network.linears]
        self._rows = -1

    def _make_room(self, rows: int) -> None:
        self._rows = rows
        activate, _ = ACTIVATIONS[self.network.activation]
        before = torch.empty(rows, self.network.linears[0].in_features)
        self._input_ND = before.numpy()
        layers = []
        for bias, weight in self._views:
            after = torch.empty(rows, len(bias))
            layers.append((bias, before, weight, after, activate, after.numpy()))
            before = after
        *self._hidden, self._head = layers


class MaskedObservations:
    """The observations of a batch's decisions as one tensor, whose first D columns are normalised.

    The passes of an update use the same rows repeatedly, and its minibatches parts of them, so the last result and the
    rows of all rollouts are cached.
    """

    def __init__(self, size: int, normaliser: RunningMeanStd | None, *, keeps_bytes: bool = False) -> None:
        self.size, self.normaliser, self.keeps_bytes = size, normaliser, keeps_bytes
        self._context: tuple[Any, ...] = ()
        self._mask_BT = torch.empty(0, dtype=torch.bool)
        self._mean_D: NDArray[np.float64] | None = None
        self._rows_RW: NDArray[Any] = np.empty(0)  # of the rollouts, one after the other
        self._answer = (torch.empty(0), torch.empty(0, dtype=torch.int64))

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """observation_ND, and place_N, their indices in the flattened [B * T]."""
        mean_D = None if self.normaliser is None else self.normaliser.mean_D
        known = len(batch.context) == len(self._context) and all(map(is_, batch.context, self._context))
        if not known:
            self._rows_RW = np.concatenate(batch.context)
        if not (known and mean_D is self._mean_D and torch.equal(batch.mask_BT, self._mask_BT)):
            self._answer = self._gather(batch)
            self._context, self._mask_BT, self._mean_D = batch.context, batch.mask_BT.clone(), mean_D
        return self._answer

    def features(self, row_NW: NDArray[Any]) -> NDArray[np.float32]:
        """The first D columns of raw rows, normalised, float32 [N, D]."""
        row_ND = np.array(row_NW[:, : self.size], dtype=np.float32)
        return row_ND if self.normaliser is None else self.normaliser.normalise(row_ND, out=row_ND)

    def _gather(self, batch: Batch) -> tuple[Tensor, Tensor]:
        place_N = np.flatnonzero(batch.mask_BT.numpy())
        lengths_B = np.array([len(row) for row in batch.context])
        # Row b begins at index b * T of the padded batch, and at the sum of the earlier lengths when concatenated.
        shift_B = np.cumsum(lengths_B) - lengths_B - np.arange(len(lengths_B)) * batch.mask_BT.shape[1]
        source_N = place_N + shift_B[place_N // batch.mask_BT.shape[1]]
        observation_ND = self._rows_RW[source_N]
        if not self.keeps_bytes:
            observation_ND = observation_ND.astype(np.float32, copy=False)
        if self.normaliser is not None:
            self.normaliser.normalise(observation_ND[:, : self.size], out=observation_ND[:, : self.size])
        return torch.from_numpy(observation_ND), torch.from_numpy(place_N)


def scatter(value_N: Tensor, place_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Scatter values of decisions ([N] or [N, V]) to [B, T] or [B, T, V]; 0 elsewhere."""
    if len(value_N) == mask_BT.numel():
        return value_N.view(*mask_BT.shape, *value_N.shape[1:])
    blank = value_N.new_zeros(mask_BT.numel(), *value_N.shape[1:])
    return blank.index_copy(0, place_N, value_N).view(*mask_BT.shape, *value_N.shape[1:])


LIMIT = 10.0  # standard deviations
EPS = 1e-8  # added to the variance


class RunningMeanStd:
    """Running mean and population variance of every observation component, over the whole run, in float64.

    Call `update` only after the optimizer steps on some rollouts and before the next rollouts; otherwise the evaluated
    policy is not the one that sampled. Before the first update the scale is 1.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean_D: NDArray[np.float64] = np.zeros(size)
        self.var_D: NDArray[np.float64] = np.ones(size)
        self._set_scale()

    def update(self, x_ND: NDArray[np.floating]) -> None:
        """Merge N observations by Chan, Golub and LeVeque (1983), eq. 1.5, independently of their split into calls.

        Raises:
            RunError: if a number is not finite, because the mean could not recover.
        """
        added = len(x_ND)
        if not added:
            return
        x_ND = x_ND.astype(np.float64)
        if not np.isfinite(x_ND).all():
            raise RunError("the environment gave an observation or a reward that is not finite: mend it, or wrap it")
        mean_D = x_ND.mean(axis=0)
        gap_D = mean_D - self.mean_D
        total = self.count + added
        squares_D = self.var_D * self.count + x_ND.var(axis=0) * added + gap_D**2 * (self.count * added / total)
        self.mean_D = self.mean_D + gap_D * (added / total)
        self.var_D = squares_D / total
        self.count = total
        self._set_scale()

    def normalise(self, x_ND: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """(x - mean) / sqrt(var + 1e-8), limited to +-10; float32 [N, D]."""
        out = np.subtract(x_ND, self._mean_D, out=out)
        np.multiply(out, self._scale_D, out=out)
        np.maximum(out, np.float32(-LIMIT), out=out)
        return np.minimum(out, np.float32(LIMIT), out=out)

    def state_dict(self) -> dict[str, Tensor]:
        """The state for a checkpoint, which later updates do not change."""
        return {
            "mean_D": torch.from_numpy(self.mean_D),
            "var_D": torch.from_numpy(self.var_D),
            "count": torch.tensor(self.count),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a saved state, bit for bit.

        Raises:
            ConfigError: if it belongs to observations of another size.
        """
        if state["mean_D"].shape != self.mean_D.shape:
            raise ConfigError(
                f"the saved observation moments are of {len(state['mean_D'])} numbers, the environment gives "
                f"{len(self.mean_D)}: resume with the environment that the run began with"
            )
        self.mean_D = state["mean_D"].numpy().copy()
        self.var_D = state["var_D"].numpy().copy()
        self.count = int(state["count"])
        self._set_scale()

    def _set_scale(self) -> None:
        self._mean_D = self.mean_D.astype(np.float32)
        self._scale_D = (1.0 / np.sqrt(self.var_D + EPS)).astype(np.float32)
