"""Statistics of several algorithms over several seeds, with confidence intervals, from their run folders.

Shapes: S steps of a run, N seeds, P points of a curve, D bootstrap draws.

Sources: Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice",
arXiv 2108.13264 (interquartile mean, bootstrap, probability of improvement). Its authors' library `rliable`
gave the numbers that tests/comparison/test_estimates.py compares these functions with.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from covey.config.files import path_error, read_below
from covey.tracking.run_folder import SUMMARY_FILE
from covey.tracking.run_store import read_metrics
from covey.tracking.wording import SECONDS, Wording, find_wording

Floats = NDArray[np.float64]

DRAWS = 20_000  # bootstrap draws for an interval in a table
CURVE_DRAWS = 1_000  # bootstrap draws at each point of a curve's band
CURVE_POINTS = 300
SMOOTHING = 0.03  # a smoothed curve is the mean over this fraction of the run's steps to each side
LAST_STEPS = 5  # steps in the mean of a metric at the end of training
SOLVED_EPISODES = 100  # Gymnasium defines solved by the mean return of 100 consecutive episodes


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def interquartile_mean(scores: ArrayLike) -> Any:
    """The mean of the middle half of the last axis: the floor(n / 4) lowest and highest scores are left out.

    More robust to one lucky or failed seed than the mean, and it needs fewer seeds than the median. For fewer than four
    scores it is their mean.

    Source: Agarwal et al. 2021, section 4.3.

    Raises:
        ValueError: if there is no score.
    """
    values = np.asarray(scores, dtype=np.float64)
    size = values.shape[-1]
    if size == 0:
        raise ValueError("the interquartile mean needs at least one score")
    cut = size // 4
    return np.sort(values, axis=-1)[..., cut : size - cut].mean(axis=-1)


def interquartile_mean_estimate(scores: ArrayLike, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """The interquartile mean with its percentile bootstrap interval: seeds are resampled with replacement.

    Source: Agarwal et al. 2021, section 4.1.

    Args:
        scores: [N].
        seed: the same seed gives the same interval.
    """
    scores_N = np.asarray(scores, dtype=np.float64)
    drawn_DN = np.random.default_rng(seed).integers(0, len(scores_N), (draws, len(scores_N)))
    return _estimate(float(interquartile_mean(scores_N)), interquartile_mean(scores_N[drawn_DN]))


def probability_of_improvement(first: ArrayLike, second: ArrayLike, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """The probability that a seed of `first` scores higher than one of `second`, with its interval; a tie counts half.

    P = mean over all pairs (i, j) of [x_i > y_j] + [x_i = y_j] / 2, which is the Mann-Whitney U statistic divided by
    the number of pairs. 0.5 is no difference. Scores may be infinite.

    Source: Agarwal et al. 2021, section 4.3.

    Args:
        first, second: the scores of their seeds, whose numbers may differ.
        seed: the same seed gives the same interval; both sets of seeds are resampled.
    """
    x_N, y_N = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    generator = np.random.default_rng(seed)
    # A win counts 2 and a tie 1: sums of integers are exact, so equal recipes give exactly 0.5.
    points = 2.0 * (x_N[:, None] > y_N) + (x_N[:, None] == y_N)
    drawn_x = generator.multinomial(len(x_N), np.full(len(x_N), 1 / len(x_N)), draws)
    drawn_y = generator.multinomial(len(y_N), np.full(len(y_N), 1 / len(y_N)), draws)
    means_D = ((drawn_x @ points) * drawn_y).sum(axis=1) / (2 * points.size)
    return _estimate(float(points.sum()) / (2 * points.size), means_D)


def _estimate(value: float, draws_D: Floats) -> Estimate:
    low, high = np.quantile(draws_D, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True)
class SeedRun:
    """One finished run, read from its folder. Arrays have one entry per training step."""

    seed: int
    wording: Wording
    spent: dict[str, Floats]  # axis -> [S], cumulative cost after each step; seconds without evaluations
    returns_S: Floats  # mean score of the step's own rollouts; NaN if no episode ended
    evaluations_S: Floats  # greedy evaluation after the step; NaN if there was none
    final: float  # the evaluation after the last step
    final_count: int  # episodes or problems in its mean
    peak_bytes: int
    ending: dict[str, float]  # metric -> its mean over the last `LAST_STEPS` steps; without metrics that the run lacks
    drawn: dict[str, Floats] = field(default_factory=dict)  # metric of a small panel -> [S]; NaN where it is missing

    @property
    def seconds_per_thousand(self) -> float:
        """Seconds of training for 1,000 episodes (or tokens)."""
        return float(1000 * self.spent[SECONDS][-1] / max(self.spent[self.wording.counted][-1], 1))


def read_seed_run(run_dir: Path, seed: int) -> SeedRun:
    """Read a finished run.

    Raises:
        ConfigError: if the folder holds no finished run.
        MachineError: if it cannot be read.
    """
    records = read_metrics(run_dir)
    try:
        summary = json.loads(read_below(run_dir, SUMMARY_FILE))
        after = summary["evaluations"][0]["after"]
        final, count, peak = float(after["score"]), int(after["count"]), int(summary["peak_memory_bytes"])
        wording = find_wording(summary)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise path_error(error, f"{run_dir} holds no finished run that can be compared, delete it", run_dir) from error
    seconds = np.cumsum(_column(records, "time/step"))
    if wording.domain == "control":
        spent = (_column(records, "environment/episodes"), _column(records, "environment/steps"), seconds)
    else:
        spent = (_column(records, "step"), np.cumsum(_column(records, "decisions/sampled")), seconds)
    return SeedRun(
        seed=seed,
        wording=wording,
        spent=dict(zip(wording.axes, spent, strict=True)),
        returns_S=_column(records, "score/mean"),
        evaluations_S=_column(records, "eval/score"),
        final=final,
        final_count=count,
        peak_bytes=peak,
        ending=_ending(records, wording),
        drawn={one.metric: _column(records, one.metric) for candidates in wording.panels for one in candidates},
    )


def _ending(records: Sequence[dict[str, Any]], wording: Wording) -> dict[str, float]:
    """The means over the last steps of the metrics that a comparison lists, and of every reward before its weight."""
    last = records[-LAST_STEPS:]
    rewards = [name for name in last[-1] if name.startswith("reward/") and name not in ("reward/mean", "reward/std")]
    columns = {name: _column(last, name) for name in (*wording.at_the_end, *rewards)}
    return {name: float(np.nanmean(column)) for name, column in columns.items() if not np.isnan(column).all()}


def _column(records: Sequence[dict[str, Any]], name: str) -> Floats:
    """A metric by step; NaN for a step without it."""
    values = [record.get(name) for record in records]
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def trailing_mean(run: SeedRun) -> Floats:
    """[S] The mean training score over at least the last 100 episodes; for language models, of each step alone.

    Steps before the first 100 episodes have the mean of the episodes so far. A step is weighted by its episodes.
    """
    if run.wording.domain != "control":
        return run.returns_S
    ended_S = run.spent["episodes"]
    counts_S = np.where(np.isnan(run.returns_S), 0.0, np.diff(ended_S, prepend=0.0))
    sums_S = np.cumsum(np.nan_to_num(run.returns_S) * counts_S)
    episodes_S = np.cumsum(counts_S)
    # The last step after which at least 100 episodes ended; -1 is the beginning.
    before_S = np.searchsorted(episodes_S, episodes_S - SOLVED_EPISODES, side="right") - 1
    sums, episodes = np.append(sums_S, 0.0), np.append(episodes_S, 0.0)
    with np.errstate(invalid="ignore"):
        return (sums_S - sums[before_S]) / (episodes_S - episodes[before_S])


@dataclass(frozen=True)
class Threshold:
    """The cost at which one seed first reached the threshold, if it did."""

    spent: dict[str, float]  # axis -> cost up to the first time; infinite if never
    kept: bool  # every later measurement reached it too, the last evaluation included

    @property
    def reached(self) -> bool:
        """True if the threshold was reached."""
        return math.isfinite(self.spent[SECONDS])


def find_threshold(run: SeedRun, threshold: float, *, evaluated: bool) -> Threshold:
    """Find the first step at which a seed reached the threshold, and whether all later measurements did too.

    Args:
        evaluated: measure by the greedy evaluations while training; else by the trailing mean of training scores.
            The evaluation after training is in both cases the measurement at the last step.
    """
    measured_S = (run.evaluations_S if evaluated else trailing_mean(run)).copy()
    measured_S[-1] = run.final
    (reached,) = np.nonzero(measured_S >= threshold)  # a comparison with NaN is False
    if not len(reached):
        return Threshold(dict.fromkeys(run.wording.axes, math.inf), kept=False)
    later = measured_S[reached[0] :]
    spent = {axis: float(values[reached[0]]) for axis, values in run.spent.items()}
    return Threshold(spent, kept=bool((later[~np.isnan(later)] >= threshold).all()))


@dataclass(frozen=True)
class Band:
    """A curve over seeds: the smoothed interquartile mean and its 95 % interval at P points."""

    spent_P: Floats
    middle_P: Floats
    low_P: Floats
    high_P: Floats


def learning_curve(runs: Sequence[SeedRun], axis: str, seed: int = 0) -> Band | None:
    """The interquartile mean of the training score over the seeds, as a function of cost; None if nothing was scored.

    Each seed is smoothed over its own steps and interpolated at common points. Seeds end at different costs, because
    better policies have longer episodes. A seed that has ended keeps its last value, so that the end of the curve is
    not an average of slow seeds alone. The curve stops at the cost at which half of the seeds have ended.
    """
    return _band([smoothed(run.spent[axis], run.returns_S) for run in runs], seed)


def metric_curve(runs: Sequence[SeedRun], name: str, axis: str, seed: int = 0) -> Band | None:
    """`learning_curve` of the metric of a small panel."""
    return _band([smoothed(run.spent[axis], run.drawn[name]) for run in runs if name in run.drawn], seed)


def _band(curves: Sequence[tuple[Floats, Floats]], seed: int) -> Band | None:
    """The band of smoothed curves, one of each seed; None if all are empty."""
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return None
    start = float(np.median([x[0] for x, _ in curves]))
    end = float(np.median([x[-1] for x, _ in curves]))
    halves = (np.linspace(start, end, CURVE_POINTS // 2), np.geomspace(start, end, CURVE_POINTS // 2))
    points_P = np.sort(np.concatenate(halves))  # also dense at the beginning, for a logarithmic axis
    values_PN = np.stack([np.interp(points_P, x, y) for x, y in curves], axis=1)
    drawn_DN = np.random.default_rng(seed).integers(0, len(curves), (CURVE_DRAWS, len(curves)))
    means_PD = np.stack([interquartile_mean(row_N[drawn_DN]) for row_N in values_PN])
    low_P, high_P = np.quantile(means_PD, (0.025, 0.975), axis=1)
    return Band(points_P, interquartile_mean(values_PN), low_P, high_P)


def smoothed(spent_S: Floats, values_S: Floats) -> tuple[Floats, Floats]:
    """Cost and running mean of the training score or another metric, at the steps that have one."""
    known = ~np.isnan(values_S)
    spent, scores = spent_S[known], values_S[known]
    reach = max(1, round(SMOOTHING * len(scores)))
    sums = np.concatenate(([0.0], np.cumsum(scores)))
    at = np.arange(len(scores))
    # Symmetric, so that the ends of the curve are not biased toward its middle.
    near = np.minimum(reach, np.minimum(at, len(scores) - 1 - at))
    first, last = at - near, at + near + 1
    return spent, (sums[last] - sums[first]) / (last - first)
