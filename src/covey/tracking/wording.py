"""Texts of the display, one table for each kind of run and of score.

They hold every text of the display, the curve and the comparison that differs between kinds of run or score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from covey.config.fields import plural
from covey.tracking.score_kinds import ACCURACY, RETURN, SCORE, ScoreKind, number, percent, whole

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
            (Panel("kl", "KL to the reference", "nats per token"),),
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
        _language(SCORE),
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
WORDINGS = {(one.domain, one.kind.name): one for one in (_language(ACCURACY), _language(SCORE), CONTROL)}


def find_wording(summary: Mapping[str, Any]) -> Wording:
    """The texts of a run, by the keys "domain" and "score_kind" of its `summary.json`."""
    return WORDINGS[summary["domain"], summary["score_kind"]]
