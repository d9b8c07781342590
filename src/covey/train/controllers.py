"""Controllers that keep the KL divergence or the entropy of the policy near a target.

Coefficient   the coefficient of the KL
BonusControl  the coefficient of the entropy bonus
ClipControl   the clip range
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from covey.algorithms import Algorithm
from covey.core.policy_losses import Surrogate, shifted_clip_range
from covey.core.schedules import Schedule, constant

Rule = Callable[[float, float, int], float]  # value, measured, rollouts of the step -> value of the next step


def _unchanged(value: float, measured: float, rollouts: int) -> float:
    return value


ENTROPY = "entropy"  # the metric: mean over the decisions of an update


class Coefficient:
    """A number that follows a schedule or, with a rule, keeps a metric near a target.

    It follows the schedule until the end of the warm-up. During the warm-up the KL is penalised less than later, and a
    coefficient that rose because of this would be too high afterwards.
    """

    def __init__(self, schedule: Schedule, metric: str = "", rule: Rule = _unchanged, *, first_step: int = 1) -> None:
        """
        Args:
            schedule: the number by step; steps count from 1.
            metric: name of the metric that is measured; empty: the number is that of the schedule.
            rule: the number of the next step.
            first_step: the first step after which the number is adapted.
        """
        self.schedule, self.metric, self.rule, self.first_step = schedule, metric, rule, first_step
        self._next = math.nan  # of the next step; NaN: that of the schedule

    def at(self, step: int) -> float:
        """The number of a step."""
        return self.schedule(step) if math.isnan(self._next) else self._next

    def after(self, step: int, metrics: Mapping[str, float], rollouts: int) -> None:
        """Adapt the next step's number to a finished step with `rollouts` rollouts, if it measured the metric."""
        measured = metrics.get(self.metric, math.nan)
        if step >= self.first_step and not math.isnan(measured):
            self._next = self.rule(self.at(step), measured, rollouts)

    def state_dict(self) -> dict[str, Any]:
        """The number of the next step, if it was adapted."""
        return {} if math.isnan(self._next) else {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of the next step."""
        self._next = state.get("next", math.nan)


class EntropyControl(Coefficient):
    """Changes the loss of every step by its number. The entropy of a step has an effect on the next one.

    This class itself leaves the algorithm as it is.
    """

    def acting(self, algorithm: Algorithm, step: int) -> Algorithm:
        """The algorithm of a step."""
        return algorithm

    def coefficients(self, step: int) -> dict[str, float]:
        """Metrics: what is adapted."""
        return {}


NO_ENTROPY_CONTROL = EntropyControl(constant(0.0))


class BonusControl(EntropyControl):
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


class ClipControl(EntropyControl):
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
