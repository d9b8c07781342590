"""Kinds of scores that evaluations average, and their formats: accuracies, scores and returns.

The kind follows from the reward: an accuracy if the reward is always right (1) or wrong (0), a score for any other
reward, a return in control. It is never guessed from the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from covey.config.fields import plural
from covey.tracking.statistics import Estimate, accuracy, best_at_k, mean_fraction, mean_score, pass_at_k

LARGE, SMALL = 1e9, 1e-3  # absolute values from LARGE on, and below SMALL, are written with an exponent

Result = Mapping[str, Any]  # an `Estimate` read from `summary.json`


@dataclass(frozen=True)
class ScoreKind:
    """One kind of score: its name in texts and in `summary.json`, its statistics and its formats."""

    name: str
    estimate: Callable[[Sequence[float]], Estimate]  # from one score per problem or episode
    write: Callable[[float], str]
    write_bound: Callable[[float], str]  # bound of an interval, written after the score
    write_label: Callable[[float], str]  # label of a point of the curve
    write_change: Callable[[float], str]
    write_tick: Callable[[float], str]  # label of an axis tick
    describe_mean: Callable[[Result], str]  # description of the values whose mean the score is
    limits: tuple[float, float] | None  # limits of the curve's axis; None: set by the data
    best_of: str  # name of the score of k answers to one problem: pass@k, best@k
    best_at_k: Callable[[Sequence[float], int], float]  # from the scores of one problem's answers
    estimate_best: Callable[[Sequence[float]], Estimate]  # from one `best_at_k` per problem

    def within(self, limits: tuple[float, float] | None) -> ScoreKind:
        """The kind of scores that are all in `limits`, so their intervals are too; None: the limits are not known."""
        if self.estimate is not mean_score or limits is None:
            return self
        bounded = partial(mean_score, limits=limits)
        return replace(self, estimate=bounded, estimate_best=bounded)

    def name_interval(self, result: Result) -> str:
        """'95 % interval 6.4% to 13.6%'; 'no interval from one problem', or 'from equal scores', whose spread is not
        known.
        """
        if not has_interval(result):
            return f"no interval from {'one problem' if result['low'] is None else 'equal scores'}"
        return f"95 % interval {self.write(result['low'])} to {self.write(result['high'])}"

    def write_interval(self, result: Result) -> str:
        """'9.4% (6.4 to 13.6)'; for a single score or equal ones, which have no interval, '39.0 (no interval)'."""
        score = self.write(result["score"])
        if not has_interval(result):
            return f"{score} (no interval)"
        return f"{score} ({self.write_bound(result['low'])} to {self.write_bound(result['high'])})"


def has_interval(result: Result) -> bool:
    """False for a single score and for equal ones, whose spread is not known."""
    return result["low"] is not None and bool(result["low"] < result["high"])


def percent(value: float) -> str:
    """0.0941 as '9.4%'."""
    return f"{value:.1%}"


def number(value: float) -> str:
    """A number of any size in two or more significant digits: '0.74', '-134.2', '12,500.0', '0.0042', '1.20e-06'."""
    size = abs(value)
    if size >= 10:
        return f"{value:,.1f}" if size < LARGE else f"{value:.2e}"
    if size >= 0.1 or not size:
        return f"{value:.2f}"
    return f"{value:.2g}" if size >= SMALL else f"{value:.2e}"


def whole(value: float) -> str:
    """12500.0 as '12,500'."""
    return f"{value:,.0f}"


def signed(change: float) -> str:
    """A change with its sign: '+0.74', '-134.2'."""
    return ("" if change < 0 else "+") + number(change)


def axis_tick(value: float) -> str:
    """The label of an axis tick: '0.25', '3,900', '1.5e-06'."""
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.6g}"


def _describe_accuracy(result: Result) -> str:
    right = round(result["score"] * result["count"])
    return f"{right:,} of {plural(result['count'], 'problem')} right"


def _right_at_k(scores: Sequence[float], k: int) -> float:
    return pass_at_k(len(scores), sum(score == 1 for score in scores), k)


def _short(value: float) -> str:
    return whole(value) if 100 <= abs(value) < LARGE else number(value)


ACCURACY = ScoreKind(
    name="accuracy",
    estimate=accuracy,
    write=percent,
    write_bound=lambda value: f"{100 * value:.1f}",
    write_label=lambda value: f"{value:.0%}",
    write_change=lambda change: f"{100 * change:+.1f} points",
    write_tick=lambda value: f"{value:.0%}",
    describe_mean=_describe_accuracy,
    limits=(0.0, 1.0),
    best_of="pass",
    best_at_k=_right_at_k,
    estimate_best=mean_fraction,
)


def _of_numbers(name: str) -> ScoreKind:
    return ScoreKind(
        name=name,
        estimate=mean_score,
        write=number,
        write_bound=number,
        write_label=_short,
        write_change=signed,
        write_tick=axis_tick,
        describe_mean=lambda result: f"mean of {plural(result['count'], 'problem')}",
        limits=None,
        best_of="best",
        best_at_k=best_at_k,
        estimate_best=mean_score,
    )


SCORE, RETURN = _of_numbers("score"), _of_numbers("return")
SCORE_KINDS = {kind.name: kind for kind in (ACCURACY, SCORE, RETURN)}


def is_above(first: Result, second: Result) -> bool:
    """True if the interval of `first` is above that of `second`; False if either has no interval."""
    if first["low"] is None or second["high"] is None:
        return False
    return bool(first["low"] > second["high"])
