"""The KL coefficient of a run: a schedule, or a controller that keeps the measured KL near a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from covey.core.schedules import Schedule

Rule = Callable[[float, float, int], float]  # value, measured, rollouts of the step -> value of the next step


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
