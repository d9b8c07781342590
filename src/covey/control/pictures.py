"""Convolutions for observations that are pictures; an `mlp.Network` follows them.

Shape legend: N observations, C channels, H rows, W columns, D = C * H * W numbers in a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from covey.config import ConfigError
from covey.control.mlp import Network, NumpyMLP, RunningMeanStd, Uninitialised

# Channels, width of the kernel, and stride of each layer. nature_cnn: Mnih et al. (2015), 'Human-level control',
# Methods; small_cnn is for grids of some ten cells, as in MinAtar.
CONVOLUTIONS = {
    "nature_cnn": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "small_cnn": ((16, 3, 1), (32, 3, 1)),
}
MLP = "mlp"


@dataclass(frozen=True)
class Picture:
    """A picture as an environment gives it: (H, W), (H, W, C) or (C, H, W), or several of these, stacked.

    Args:
        shape: of the array. Two equal neighbours are height and width; without them the channels are the last
            dimension, unless the first is the smaller one.
        scale: factor of the numbers: 1/255 for bytes, 1 for booleans.
    """

    shape: tuple[int, ...]
    scale: float

    @classmethod
    def of(cls, space: Space) -> Picture | None:
        """The picture in a Box of bytes or booleans; None for another space."""
        if not (isinstance(space, spaces.Box) and space.dtype in (np.uint8, np.bool_) and 2 <= len(space.shape) <= 4):
            return None
        return cls(space.shape, 1 / 255 if space.dtype == np.uint8 else 1.0)

    def planes(self, row_ND: Tensor) -> Tensor:
        """Flattened pictures of any dtype -> float32 [N, C, H, W]."""
        shape = self.shape if len(self.shape) > 2 else (*self.shape, 1)
        *stacked, first, middle, last = shape
        picture = row_ND.reshape(len(row_ND), *(stacked or (1,)), *shape[-3:])
        if first == middle or (middle != last and first >= last):
            picture = picture.permute(0, 1, 4, 2, 3)
        return picture.flatten(1, 2).float() * self.scale

    def choose(self, network: str, where: str) -> str:
        """The network for `policy.network`; "auto" is the first of CONVOLUTIONS for which the picture is large enough.

        Raises:
            ConfigError: if it is too small for the network that was named.
        """
        if network == MLP:
            return network
        blank = torch.zeros(1, int(np.prod(self.shape)), device="meta")
        height, width = self.planes(blank).shape[2:]
        fitting = [name for name, layers in CONVOLUTIONS.items() if min(height, width) >= _smallest(layers)]
        if network in CONVOLUTIONS and network not in fitting:
            least = _smallest(CONVOLUTIONS[network])
            raise ConfigError(
                f"environment {where!r} observes pictures of {height} x {width}, and policy.network = {network!r} "
                f"needs {least} x {least}: set it to {[*fitting, MLP][0]!r}"
            )
        return network if network in CONVOLUTIONS else [*fitting, MLP][0]


def _smallest(layers: Sequence[tuple[int, int, int]]) -> int:
    """Height of the smallest picture of which these layers leave a pixel."""
    height = 1
    for _, kernel, stride in reversed(layers):
        height = (height - 1) * stride + kernel
    return height


class _Convolution(Uninitialised, nn.Conv2d):
    """A convolution."""


class PictureNetwork(Network):
    """[N, D] bytes -> [N, O]: the convolutions of `network`, each followed by a ReLU, and then a `Network`.

    Weights are orthogonal with gain sqrt 2, biases zero.
    """

    def __init__(
        self,
        picture: Picture,
        network: str,
        hidden: Sequence[int],
        outputs: int,
        *,
        seed: int,
        **options: Any,
    ) -> None:
        """`options` as for `Network`."""
        blank = picture.planes(torch.zeros(1, int(np.prod(picture.shape))))
        generator = torch.Generator().manual_seed(seed + 2**32)  # another stream than that of the later layers
        convolutions: list[nn.Module] = []
        for channels, kernel, stride in CONVOLUTIONS[network]:
            layer = _Convolution(blank.shape[1], channels, kernel, stride)
            nn.init.orthogonal_(layer.weight, 2**0.5, generator=generator)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            convolutions += [layer, nn.ReLU()]
            with torch.no_grad():
                blank = layer(blank)
        size = blank[0].numel()
        super().__init__(size, hidden, outputs, seed=seed, **options)
        self.picture = picture
        self.convolutions = nn.Sequential(*convolutions)

    def forward(self, x_ND: Tensor) -> Tensor:
        return super().forward(self.convolutions(self.picture.planes(x_ND)).flatten(1))


class TorchForward:
    """A network's forward pass in torch, for acting; as `NumpyMLP`, which is faster for a few layers."""

    def __init__(self, network: Network, size: int) -> None:
        self.network, self.size = network, size

    def __call__(self, row_NW: NDArray[Any]) -> NDArray[np.float32]:
        with torch.no_grad():
            output: NDArray[np.float32] = self.network(torch.from_numpy(row_NW[:, : self.size])).numpy()
        return output


def build_network(
    size: int, hidden: Sequence[int], outputs: int, *, picture: Picture | None, network: str, **options: Any
) -> Network:
    """The network of a policy or a critic, for observations of `size` numbers; `options` as for `Network`."""
    if picture is None or network == MLP:
        return Network(size, hidden, outputs, **options)
    return PictureNetwork(picture, network, hidden, outputs, **options)


def acting(network: Network, size: int, normaliser: RunningMeanStd | None) -> NumpyMLP | TorchForward:
    """The forward pass of a network for acting."""
    return TorchForward(network, size) if isinstance(network, PictureNetwork) else NumpyMLP(network, normaliser)
