"""What a check reads: the metrics of a run in bounded windows, and the settings of the run; and what it returns.

Of each metric the first values and the last ones are kept.

A *level* is the median of the last `RECENT` values, the *start* that of the first `START` values. Medians and the
median absolute deviation (MAD) are used, because single steps are noisy and their outliers are large.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

START = 5  # values of a metric that its start is estimated from
RECENT = 10  # last values that its level is estimated from
SETTLED = 20  # values before which no level is compared with the start
KEPT = 60  # last values that are kept

MAD_TO_STD = 1.4826  # standard deviation of a normal distribution, divided by its MAD
MEAN_DEVIATION_TO_STD = 1.2533  # the same for the mean absolute deviation
MEDIAN_TO_MEAN = 1.2533  # standard error of a median, divided by that of the mean
STALLED = 0.1  # fraction of the gain since the start
CERTAIN = 3.0  # standard errors of a difference beyond which it is more than noise

# Fields that have other names in control.
IN_CONTROL = {
    "sampling.group_size": "rollouts.group_size",
    "sampling.prompts_per_step": "rollouts.starts_per_step",
}
Severity = Literal["warning", "problem"]


@dataclass(frozen=True)
class Seen:
    """The observation of a check at one step."""

    evidence: str
    remedy: str
    severity: Severity = "warning"
    explanation: str = ""  # in place of the check's


@dataclass(frozen=True)
class Best:
    """The highest level of a metric so far, and the level of the reward at that step, with their standard errors."""

    step: int
    value: float
    error: float
    reward: float
    reward_error: float


@dataclass(frozen=True)
class HeldOut:
    """A score on held-out problems, and the level of the reward at that step, with their standard errors."""

    step: int
    score: float
    error: float
    reward: float
    reward_error: float


class Series:
    """One metric: its first values, its last values, their sum, number and maximum."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=KEPT)
        self.count = 0
        self.total = 0.0
        self.highest = -math.inf
        self.best: Best | None = None

    def add(self, value: float) -> None:
        if len(self.first) < START:
            self.first.append(value)
        self.last.append(value)
        self.count += 1
        self.total += value
        self.highest = max(self.highest, value)


class History:
    """The metrics of the steps so far. Memory and the time of `add` do not grow with the number of steps."""

    def __init__(self, names: Iterable[str]) -> None:
        self.series = {name: Series() for name in dict.fromkeys(names)}
        self.step = 0
        self.steps = 0  # number of recorded steps
        self.held_out: deque[HeldOut] = deque(maxlen=KEPT)

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add a step; a value that is None or not finite is left out."""
        self.step = step
        self.steps += 1
        for name, series in self.series.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                series.add(value)

    def of(self, name: str) -> Series:
        """The values of a metric, none if it was never recorded. The history must have been told its name."""
        return self.series[name]

    def recent(self, name: str, size: int = RECENT, *, skip: int = 0) -> Sequence[float]:
        """The last `size` values of a metric before the last `skip`."""
        values = list(self.of(name).last)
        return values[max(len(values) - skip - size, 0) : len(values) - skip]

    def level(self, name: str, *, skip: int = 0) -> float | None:
        """Median of the last `RECENT` values; None before there are as many."""
        values = self.recent(name, skip=skip)
        return median(values) if len(values) == RECENT else None

    def start(self, name: str) -> float | None:
        """Median of the first `START` values; None before the metric has `SETTLED` values."""
        return median(self.of(name).first) if self.of(name).count >= SETTLED else None

    def rise(self, name: str) -> float | None:
        """Level minus start in standard errors; None before the metric has settled."""
        start, level = self.start(name), self.level(name)
        if start is None or level is None:
            return None
        return in_errors(level - start, error_of(self.of(name).first), error_of(self.recent(name)))

    def rises(self, name: str) -> bool:
        """True if the level of a metric is above its start by more than noise."""
        return (self.rise(name) or 0.0) > CERTAIN

    def falls(self, name: str) -> bool:
        """True if the level of a metric is below its start by more than noise."""
        return (self.rise(name) or 0.0) < -CERTAIN

    def stalls(self, name: str) -> bool:
        """True if a metric gained next to nothing in the last steps, beside its gain since the start."""
        start, before, now = self.start(name), self.level(name, skip=RECENT), self.level(name)
        if start is None or before is None or now is None:
            return False
        return now - before <= STALLED * max(now - start, before - start, 0.0)

    def mark_best(self, name: str) -> None:
        """Note the level of a metric if it is the highest so far."""
        level, reward, series = self.level(name), self.level("reward/mean"), self.of(name)
        if level is None or reward is None or (series.best is not None and level <= series.best.value):
            return
        errors = error_of(self.recent(name)), error_of(self.recent("reward/mean"))
        series.best = Best(self.step, level, errors[0], reward, errors[1])

    def loss_of_best(self, name: str) -> float:
        """How far the level of a metric is below its best, in standard errors; 0 if unknown."""
        best, level = self.of(name).best, self.level(name)
        if best is None or level is None:
            return 0.0
        return in_errors(best.value - level, best.error, error_of(self.recent(name)))

    def add_held_out(self, step: int, score: float, error: float) -> None:
        """Add a score on held-out problems; `step` 0 is before training."""
        rewards = self.recent("reward/mean") if step else self.of("reward/mean").first
        if rewards:
            self.held_out.append(HeldOut(step, score, error, median(rewards), error_of(rewards)))


def error_of(values: Sequence[float]) -> float:
    """Standard error of the median of the values, by their MAD; if that is 0, by their mean absolute deviation."""
    middle = median(values)
    deviations = [abs(value - middle) for value in values]
    std = MAD_TO_STD * median(deviations) or MEAN_DEVIATION_TO_STD * fmean(deviations)
    return MEDIAN_TO_MEAN * std / math.sqrt(len(values))


def in_errors(difference: float, *errors: float) -> float:
    """A difference in standard errors; that of exact numbers is infinite unless it is 0."""
    error = math.hypot(*errors)
    if error == 0.0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error


class Settings:
    """Access to a config by dotted names, such as "update.learning_rate"."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.is_control = "environment" in config
        self.algorithm = str(config.get("algorithm", "grpo"))
        self.has_critic = self.algorithm == "ppo"

    def get(self, field: str, default: Any = None) -> Any:
        """The value of a field, by the name that it has for language models; `default` if it is unset."""
        table: Any = self.config
        for key in self._name(field).split("."):
            if not isinstance(table, Mapping) or key not in table:
                return default
            table = table[key]
        return table

    def number(self, field: str, default: float) -> float:
        """The value of a field if it is a number, else `default`."""
        value = self.get(field)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def change(self, field: str, value: float | str | bool) -> str:
        """A field with a value to try, and its present value: "update.learning_rate = 1e-05 (now 3e-05)"."""
        now = self.get(field)
        return f"{self._name(field)} = {_text(value)} ({'unset now' if now is None else f'now {_text(now)}'})"

    def scaled(self, field: str, factor: float, default: float) -> str:
        """`change` of a number by a factor."""
        value = self.number(field, default) * factor
        return self.change(field, round(value) if isinstance(self.get(field), int) and value >= 1 else value)

    @property
    def lower_rate(self) -> str:
        """`change` of the learning rate to a third."""
        return self.scaled("update.learning_rate", 1 / 3, 1e-5)

    def _name(self, field: str) -> str:
        return IN_CONTROL.get(field, field) if self.is_control else field

    @property
    def steps(self) -> int:
        """Training steps of the recipe; 0 if unknown."""
        return int(self.number("steps", 0))

    @property
    def optimizer_steps(self) -> int:
        """Most optimizer steps of the policy for one batch of rollouts."""
        return int(self.number("update.epochs", 1) * self.number("update.minibatches", 1))

    @property
    def max_resamples(self) -> int:
        """Rounds in which a step may replace groups without signal."""
        return int(self.number("sampling.max_resamples", 3 if self.algorithm == "dapo" else 0))

    @property
    def goal(self) -> float | None:
        """The return that the recipe expects; None if it names none."""
        value = self.number("evaluation.expected_return", float("nan"))
        return None if value != value else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.3g}" if isinstance(value, float) else str(value)
