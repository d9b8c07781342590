"""Controllers that keep the KL divergence or the entropy of the policy near a target.

NoEntropyControl  the algorithm as it is
BonusControl      adapts the coefficient of the entropy bonus
ClipControl       adapts the clip range
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from covey.algorithms import Algorithm
from covey.core.policy_losses import Surrogate, shifted_clip_range
from covey.core.schedules import Schedule, constant

ENTROPY = "entropy"  # the metric: mean over the decisions of an update


class KLCoefficient(Protocol):
    """The coefficient of every step."""

    def at(self, step: int) -> float:
        """The coefficient of a step; steps count from 1."""

    def after(self, step: int, metrics: Mapping[str, float], rollouts: int) -> None:
        """Adapt the coefficient to the metrics of a finished step with `rollouts` rollouts."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class ScheduledCoefficient:
    """A function of the step alone."""

    def __init__(self, schedule: Schedule) -> None:
        self.at = schedule

    def after(self, step: int, metrics: Mapping[str, float], rollouts: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class AdaptiveCoefficient:
    """Controller that keeps a metric near a target.

    The coefficient follows the schedule until the end of the warm-up. During the warm-up the KL is penalised less than
    later, and a coefficient that rose because of this would be too high afterwards.
    """

    def __init__(self, schedule: Schedule, metric: str, rule: Rule, *, first_step: int = 1) -> None:
        """
        Args:
            schedule: the coefficient of the first steps.
            metric: name of the metric that is measured.
            rule: the coefficient of the next step.
            first_step: the first step after which the coefficient is adapted.
        """
        self.schedule, self.metric, self.rule, self.first_step = schedule, metric, rule, first_step
        self._next = math.nan  # the coefficient of the next step; NaN: that of the schedule

    def at(self, step: int) -> float:
        return self.schedule(step) if math.isnan(self._next) else self._next

    def after(self, step: int, metrics: Mapping[str, float], rollouts: int) -> None:
        """Set the coefficient of the next step, if this step measured the metric."""
        measured = metrics.get(self.metric, math.nan)
        if step >= self.first_step and not math.isnan(measured):
            self._next = self.rule(self.at(step), measured, rollouts)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient of the next step."""
        return {} if math.isnan(self._next) else {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient of the next step."""
        self._next = state.get("next", math.nan)


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


Rule = Callable[[float, float, int], float]  # value, measured, rollouts of the step -> value of the next step
