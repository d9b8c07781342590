"""Texts of the display, one table for each kind of run and of score.

They hold every text of the display, the curve and the comparison that differs between kinds of run or score. The kind
of a score follows from the reward: an accuracy if it is always right (1) or wrong (0), a score for any other, a return
in control. It is never guessed from the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

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
LOSS = replace(_of_numbers("loss"), write="{:.4f}".format, write_change="{:+.4f}".format)  # the only one that falls
SCORE_KINDS = {kind.name: kind for kind in (ACCURACY, SCORE, RETURN, LOSS)}


def is_above(first: Result, second: Result) -> bool:
    """True if the interval of `first` is above that of `second`; False if either has no interval."""
    if first["low"] is None or second["high"] is None:
        return False
    return bool(first["low"] > second["high"])


SECONDS = "seconds of training"


@dataclass(frozen=True)
class Shown:
    """A labelled number in the live panel and in the lines of a log: the sum of its metrics."""

    metrics: tuple[str, ...]
    label: str
    write: Callable[[float], str]


@dataclass(frozen=True)
class Panel:
    """A small panel of the curve. A limit of None is set by the data."""

    metric: str
    title: str
    unit: str
    low: float | None = 0.0
    high: float | None = None


@dataclass(frozen=True)
class Wording:
    """Texts for one kind of run. `{names}` in them are keys of `summary.json` or further format arguments."""

    domain: str  # "language" or "control"
    kind: ScoreKind  # of evaluations
    measured: str  # the unit that an evaluation counts, in the singular
    evaluation: str  # in the curve's legend
    table_title: str
    case: str  # heading of the table's first column
    case_of: Callable[[Mapping[str, Any], Mapping[str, Any]], str]  # the column's text for a summary and an evaluation
    cost: Callable[[Mapping[str, Any]], str]  # cost of a run other than its time, from its summary
    prompt: str  # label of a group's common start
    quick: bool  # steps take milliseconds, so a log has at most one line per second
    shown: tuple[Shown, ...]
    drawn: tuple[str, ...]  # metrics with a sparkline
    held_out: str = field(default="eval/score", kw_only=True)  # the metric of an evaluation
    x_metric: str  # metric on the curve's x axis
    x_label: str
    legend: Literal["upper left", "lower right", "best"]  # position without overlap with the curve
    panels: tuple[tuple[Panel, ...], ...]  # for each place the candidates, of which the first measured one is drawn
    axes: tuple[str, ...]  # x axes of a comparison's figure; the last is always seconds
    training_score: str  # description of the training score in a comparison
    counted: str  # the axis on which a comparison measures cost, in thousands
    at_the_end: tuple[str, ...]  # metrics of the last steps that a comparison lists

    def count_measured(self, count: int) -> str:
        """'1 problem', '256 problems'."""
        return plural(count, self.measured)


def _digits(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{count}f}"


def _reward(value: float) -> str:
    """Three decimals if the number is large enough for them, else the general format."""
    return f"{value:.3f}" if not value or 0.001 <= abs(value) < 10_000 else number(value)


ENTROPY = Panel("entropy", "Entropy", "nats per decision", low=None)
GRADIENT = Panel("grad_norm", "Gradient norm", "before clipping")
STEP_TIME = Panel("time/step", "Time of a step", "seconds")
DEAD_GROUPS = Panel("groups/zero_advantage_fraction", "Groups with equal rewards", "fraction", high=1.0)


def _language(kind: ScoreKind) -> Wording:
    return Wording(
        domain="language",
        kind=kind,
        measured="problem",
        evaluation=f"held-out {kind.name}, greedy, {{measured}}",
        table_title=f"Held-out {kind.name} on {{measured}}, greedy answers (95 % interval)",
        case="token limit",
        case_of=lambda _, evaluation: str(evaluation["max_new_tokens"]),
        cost=lambda summary: f"{plural(summary['decisions_sampled'], 'token')} sampled",
        prompt="prompt",
        quick=False,
        shown=(
            Shown(("reward/mean",), "reward", _reward),
            Shown(("score/mean",), kind.name, kind.write),
            Shown(("kl",), "KL", _digits(4)),
            Shown(("teacher/divergence",), "to the teacher", _digits(4)),
            Shown(("entropy",), "entropy", _digits(3)),
            Shown(("length/mean",), "length", _digits(1)),
            Shown(("groups/zero_advantage_fraction",), "dead groups", lambda value: f"{value:.0%}"),
            Shown(("decisions_per_second",), "tokens/s", whole),
            Shown(("eval/score",), "held-out", kind.write),
        ),
        drawn=("score/mean", "reward/mean"),
        x_metric="step",
        x_label="training step",
        legend="upper left" if kind.limits else "best",
        panels=(
            (
                Panel("kl", "KL to the reference", "nats per token"),
                Panel("length/truncated_fraction", "Completions at the limit", "fraction", high=1.0),
            ),
            (replace(ENTROPY, unit="nats per token"),),
            (Panel("length/mean", "Completion length", "tokens"),),
            (GRADIENT,),
            (DEAD_GROUPS,),
            (STEP_TIME,),
        ),
        axes=("training steps", "tokens", SECONDS),
        training_score="the mean score of a training step, with sampled answers",
        counted="tokens",
        at_the_end=("score/mean", "entropy", "kl", "length/mean", "length/truncated_fraction", DEAD_GROUPS.metric),
    )


CONTROL = Wording(
    domain="control",
    kind=RETURN,
    measured="evaluation episode",
    evaluation="return, best actions, {measured}",
    table_title="Mean return of {measured}, best actions (95 % interval)",
    case="environment",
    case_of=lambda summary, _: str(summary["environment"]),
    cost=lambda summary: (
        f"{plural(summary['environment_steps'], 'environment step')}, {plural(summary['episodes'], 'episode')}"
    ),
    prompt="seed",
    quick=True,
    shown=(
        Shown(("score/mean",), "return", number),
        Shown(("eval/score",), "evaluation", number),
        Shown(("environment/episodes",), "episodes", whole),
        Shown(("environment/steps",), "environment steps", whole),
        Shown(("entropy",), "entropy", _digits(3)),
        Shown(("clip/low", "clip/high"), "clipped", percent),
        Shown(("decisions_per_second",), "steps/s", whole),
    ),
    drawn=("score/mean", "eval/score"),
    x_metric="environment/steps",
    x_label="environment steps",
    legend="lower right",
    panels=(
        (
            Panel("kl", "KL to the reference", "nats per decision"),
            Panel("kl/behavior", "KL of an update", "nats per decision"),
        ),
        (ENTROPY,),
        (Panel("length/mean", "Length of a rollout", "decisions"),),
        (GRADIENT,),
        (Panel("value/explained_variance", "Explained variance of the critic", "fraction", -1.0, 1.0), DEAD_GROUPS),
        (STEP_TIME,),
    ),
    axes=("episodes", "environment steps", SECONDS),
    training_score="the mean return of the last 100 training episodes, with sampled actions",
    counted="episodes",
    at_the_end=("score/mean", "entropy", "kl/behavior", "value/explained_variance", DEAD_GROUPS.metric),
)


def _supervised(name: str, *more: Shown) -> Wording:
    """Texts of a training on examples, whose metrics begin with `name`."""
    loss, held_out = f"{name}/loss", f"{name}/held_out_loss"
    return replace(
        _language(LOSS),
        measured="example",
        evaluation="held-out loss, {measured}",
        table_title="Held-out loss on {measured}",
        case="examples",
        case_of=lambda _, evaluation: whole(evaluation["before"]["count"]),
        cost=lambda summary: plural(summary["examples"]["training"], "example"),
        quick=True,
        shown=(
            Shown((loss,), "loss", _digits(4)),
            Shown((held_out,), "held-out loss", _digits(4)),
            *more,
            Shown((f"{name}/epoch",), "epoch", _digits(2)),
        ),
        drawn=(loss, held_out),
        held_out=held_out,
    )


SFT = _supervised("sft")
REWARD_MODEL = _supervised("reward_model", Shown(("reward_model/accuracy",), "accuracy", _digits(3)))
WORDINGS = {(one.domain, one.kind.name): one for one in (_language(ACCURACY), _language(SCORE), CONTROL, SFT)}
HELD_OUT_METRICS = tuple(dict.fromkeys(one.held_out for one in (*WORDINGS.values(), REWARD_MODEL)))


def find_wording(summary: Mapping[str, Any]) -> Wording:
    """The texts of a run, by the keys "domain" and "score_kind" of its `summary.json`."""
    return WORDINGS[summary["domain"], summary["score_kind"]]
