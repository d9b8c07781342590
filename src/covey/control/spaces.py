"""What an agent can do: choose one of a few actions, or push with some numbers.

Shape legend: N environments side by side, A numbers in an action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Discrete:
    """One of `count` actions, numbered from 0."""

    count: int


@dataclass(frozen=True, eq=False)
class Continuous:
    """A vector of A numbers; the policy may propose any, the environment gets them clipped to its bounds."""

    low_A: NDArray[np.float32]
    high_A: NDArray[np.float32]

    @property
    def size(self) -> int:
        return len(self.low_A)


ActionSpace = Discrete | Continuous
