"""Controllers that keep the entropy of the policy near a target.

NoEntropyControl  the algorithm as it is
BonusControl      adapts the coefficient of the entropy bonus
ClipControl       adapts the clip range
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from covey.algorithms import Algorithm
from covey.core.policy_losses import Surrogate, shifted_clip_range
from covey.core.schedules import constant
from covey.train.kl_coefficient import AdaptiveCoefficient, Rule

ENTROPY = "entropy"  # the metric: mean over the decisions of an update


class EntropyControl(Protocol):
    """Changes the loss of every step. The entropy of a step has an effect on the next one."""

    def acting(self, algorithm: Algorithm, step: int) -> Algorithm:
        """The algorithm of a step; steps count from 1."""

    def coefficients(self, step: int) -> dict[str, float]:
        """Metrics: what is adapted."""

    def after(self, step: int, metrics: Mapping[str, float], rollouts: int) -> None:
        """Adapt to the metrics of a finished step."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class NoEntropyControl:
    """Leaves the algorithm as it is."""

    def acting(self, algorithm: Algorithm, step: int) -> Algorithm:
        return algorithm

    def coefficients(self, step: int) -> dict[str, float]:
        """Empty."""
        return {}

    def after(self, step: int, metrics: Mapping[str, float], rollouts: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


NO_ENTROPY_CONTROL = NoEntropyControl()


class BonusControl(AdaptiveCoefficient):
    """Adapts the coefficient of the entropy bonus."""

    def __init__(self, rule: Rule, *, coefficient: float) -> None:
        """
        Args:
            rule: the coefficient of the next step.
            coefficient: of the first step.
        """
        super().__init__(constant(coefficient), ENTROPY, rule)

    def acting(self, algorithm: Algorithm, step: int) -> Algorithm:
        return replace(algorithm, entropy_coefficient=self.at(step))

    def coefficients(self, step: int) -> dict[str, float]:
        return {"entropy_coefficient": self.at(step)}


class ClipControl(AdaptiveCoefficient):
    """Adapts the clip range by a factor: `covey.core.policy_losses.shifted_clip_range`."""

    def __init__(self, rule: Rule, *, clip_low: float, clip_high: float) -> None:
        """
        Args:
            rule: the factor of the next step.
            clip_low, clip_high: the clip range of the first step, with the factor 1.
        """
        super().__init__(constant(1.0), ENTROPY, rule)
        self.clip_range = clip_low, clip_high

    def acting(self, algorithm: Algorithm, step: int) -> Algorithm:
        low, high = shifted_clip_range(*self.clip_range, self.at(step))
        surrogate: Callable[..., Surrogate] = algorithm.surrogate
        return replace(algorithm, surrogate=partial(surrogate, clip_low=low, clip_high=high))

    def coefficients(self, step: int) -> dict[str, float]:
        low, high = shifted_clip_range(*self.clip_range, self.at(step))
        return {"clip/range_low": low, "clip/range_high": high}
