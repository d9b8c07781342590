"""Scales rewards, so that one learning rate and critic suit every environment.

Shape legend: N slots, T steps.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from covey.control.mlp import RunningMeanStd
from covey.data import Stateless

LIMIT = 10.0  # standard deviations


class RewardScale(Stateless):
    """Scales the environment's rewards for training; this one leaves them as they are. Scores keep the environment's
    units.
    """

    def scale(
        self, rewards_NT: NDArray[np.float64], ended_NT: NDArray[np.bool_], counted_NT: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Scale the rewards of a training step, given the ends of returns and a mask of the entries that are decisions.

        The other entries (finished slots, resets) have no reward and do not count in the statistics.
        """
        return rewards_NT

    def metrics(self) -> dict[str, float]:
        """Metrics of the running state; may be empty."""
        return {}


class ClipReward(RewardScale):
    """Rewards clipped to -1..1: Mnih et al. (2015), 'Human-level control'. It may change the optimal policy."""

    def scale(
        self, rewards_NT: NDArray[np.float64], ended_NT: NDArray[np.bool_], counted_NT: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        return np.clip(rewards_NT, -1.0, 1.0)


class RunningStdScaling(RewardScale):
    """Rewards divided by the running standard deviation of the discounted return, then clipped to +-10.

    The return is summed forward, g_t = gamma g_{t-1} + r_t, as in OpenAI's baselines: Engstrom et al.
    (arXiv 2005.12729), section 2. The mean is not subtracted, because that would reward or penalise longer episodes.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self.moments = RunningMeanStd(1)
        self.return_N: NDArray[np.float64] = np.zeros(0)

    def scale(
        self, rewards_NT: NDArray[np.float64], ended_NT: NDArray[np.bool_], counted_NT: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        if len(self.return_N) != len(rewards_NT):
            self.return_N = np.zeros(len(rewards_NT))
        returns_TN = np.empty(rewards_NT.T.shape)
        for t in range(len(returns_TN)):
            self.return_N = self.gamma * self.return_N + rewards_NT[:, t]
            returns_TN[t] = self.return_N
            self.return_N = np.where(ended_NT[:, t], 0.0, self.return_N)
        self.moments.update(returns_TN[counted_NT.T][:, None])
        return np.clip(rewards_NT / self.std, -LIMIT, LIMIT)

    @property
    def std(self) -> float:
        """Standard deviation of the discounted return, over the run so far."""
        return float(np.sqrt(self.moments.var_D[0] + 1e-8))

    def metrics(self) -> dict[str, float]:
        return {"reward_scale": self.std}

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments.state_dict(), "return_N": torch.from_numpy(self.return_N.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments.load_state_dict(state["moments"])
        self.return_N = state["return_N"].numpy().copy()
