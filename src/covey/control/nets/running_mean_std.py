"""Normalises observations by their running mean and variance.

Shape legend: N observations, D numbers in one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.config import ConfigError, RunError

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
