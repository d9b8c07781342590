"""Action spaces: one discrete action, several at once, or a vector of numbers.

Shape legend: N environments, A numbers in an action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Discrete:
    """One of `count` actions, numbered from 0."""

    count: int
    size = 1  # numbers in an action

    @property
    def outputs(self) -> int:
        """Outputs of the policy's network: one logit per action."""
        return self.count

    @property
    def entropy_range(self) -> tuple[float, float]:
        """Lowest and highest entropy of a policy, in nats."""
        return 0.0, math.log(self.count)


@dataclass(frozen=True)
class MultiDiscrete:
    """A choices, independent given the observation; choice i is one of `counts[i]` actions."""

    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """A."""
        return len(self.counts)

    @property
    def outputs(self) -> int:
        """Outputs of the policy's network: the concatenated logits of all choices."""
        return sum(self.counts)

    @property
    def entropy_range(self) -> tuple[float, float]:
        """Lowest and highest entropy of a policy, in nats."""
        return 0.0, sum(map(math.log, self.counts))


@dataclass(frozen=True, eq=False)
class Continuous:
    """A vector of A unbounded numbers, which are clipped to the environment's bounds."""

    low_A: NDArray[np.float32]
    high_A: NDArray[np.float32]

    @property
    def size(self) -> int:
        """A."""
        return len(self.low_A)

    @property
    def outputs(self) -> int:
        """Outputs of the policy's network: the means of a Gaussian."""
        return len(self.low_A)

    @property
    def entropy_range(self) -> tuple[float, float]:
        """Lowest and highest entropy of a policy, in nats: a density has no limits."""
        return -math.inf, math.inf


ActionSpace = Discrete | MultiDiscrete | Continuous
