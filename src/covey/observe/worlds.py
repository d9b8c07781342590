"""The words and numbers in which a run is told, for language models and for control: one table each.

The display and the curve take all that differs between the two worlds from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SECONDS = "seconds of training"

Result = Mapping[str, float]  # as `covey.observe.statistics.mean_score` makes it


@dataclass(frozen=True)
class Shown:
    """A number of the live panel and of a log's lines: the sum of its metrics, under a label."""

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
    """How a run of one world is told. `{names}` in the texts are keys of `summary.json` or given beside them."""

    score: str  # what a score is called
    write_score: Callable[[float], str]
    write_label: Callable[[float], str]  # beside a point of the curve
    write_interval: Callable[[Result], str]
    write_change: Callable[[float], str]
    score_limits: tuple[float, float] | None  # of the curve; None: set by the data
    evaluation: str  # of the curve's legend
    table_title: str
    case: str  # heading of the table's first column
    case_of: Callable[[Mapping[str, Any], Mapping[str, Any]], str]  # its text, from the summary and an evaluation
    cost: str
    advice: Mapping[str, str]  # by the verdict of `covey.observe.display.verdict`
    prompt: str  # what rollouts of a group have in common
    quick: bool  # steps take milliseconds: a log gets a line a second at the most
    shown: tuple[Shown, ...]
    drawn: tuple[str, ...]  # metrics with a sparkline
    x_metric: str  # what the curve goes by
    x_label: str
    legend: Literal["upper left", "lower right"]  # where the curve leaves room for it
    panels: tuple[tuple[Panel, ...], ...]  # of each place the first that was measured
    axes: tuple[str, ...]  # what a comparison draws the score by; the last is always seconds
    counted: str  # the axis whose thousands a comparison tells the price by


def percent(value: float) -> str:
    """0.0941 as '9.4%'."""
    return f"{value:.1%}"


def number(value: float) -> str:
    """A return, short and with enough digits: '0.74', '-134.2', '12,500.0'."""
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"


def whole(value: float) -> str:
    """12500.0 as '12,500'."""
    return f"{value:,.0f}"


def _digits(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{count}f}"


def _percent_interval(result: Result) -> str:
    """'9.4% (6.4 to 13.6)'."""
    return f"{result['score']:.1%} ({100 * result['low']:.1f} to {100 * result['high']:.1f})"


def _number_interval(result: Result) -> str:
    """'213.4 (198.0 to 229.1)'."""
    return f"{number(result['score'])} ({number(result['low'])} to {number(result['high'])})"


def _signed_number(change: float) -> str:
    return ("+" if change >= 0 else "") + number(change)


ENTROPY = Panel("entropy", "Entropy", "nats per decision", low=None)
DEAD_GROUPS = Panel("groups/dead_share", "Groups that teach nothing", "share", high=1.0)

LANGUAGE = Wording(
    score="accuracy",
    write_score=percent,
    write_label=lambda value: f"{value:.0%}",
    write_interval=_percent_interval,
    write_change=lambda change: f"{100 * change:+.1f} points",
    score_limits=(0.0, 1.0),
    evaluation="held-out accuracy, greedy, {count} problems (95 % interval)",
    table_title="Held-out accuracy on {count} problems, greedy answers (95 % interval)",
    case="token limit",
    case_of=lambda _, evaluation: str(evaluation["max_new_tokens"]),
    cost="{decisions_sampled:,} tokens sampled",
    advice={
        "better": "The policy got better. Next: see how sure it is with: covey eval {run_dir} --samples 16",
        "worse": "The policy got worse. Next: lower the learning rate: covey train {recipe} --learning-rate 3e-6",
        "unclear": "The intervals overlap, so the change may be chance. Next: train for longer: "
        "covey train {recipe} --steps {twice_the_steps}",
    },
    prompt="prompt",
    quick=False,
    shown=(
        Shown(("reward/mean",), "reward", _digits(3)),
        Shown(("score/mean",), "accuracy", percent),
        Shown(("kl",), "KL", _digits(4)),
        Shown(("entropy",), "entropy", _digits(3)),
        Shown(("length/mean",), "length", _digits(1)),
        Shown(("groups/dead_share",), "dead groups", lambda value: f"{value:.0%}"),
        Shown(("decisions_per_second",), "tokens/s", whole),
        Shown(("eval/score",), "held-out", percent),
    ),
    drawn=("score/mean", "reward/mean"),
    x_metric="step",
    x_label="training step",
    legend="upper left",
    panels=(
        (Panel("kl", "KL to the reference", "nats per token"),),
        (Panel("length/mean", "Completion length", "tokens"),),
        (DEAD_GROUPS,),
    ),
    axes=("training steps", "tokens", SECONDS),
    counted="tokens",
)

CONTROL = Wording(
    score="return",
    write_score=number,
    write_label=lambda value: whole(value) if abs(value) >= 100 else number(value),
    write_interval=_number_interval,
    write_change=_signed_number,
    score_limits=None,
    evaluation="evaluation return, best actions, {count} episodes (95 % interval)",
    table_title="Mean return of {count} evaluation episodes, best actions (95 % interval)",
    case="environment",
    case_of=lambda summary, _: str(summary["environment"]),
    cost="{environment_steps:,} environment steps, {episodes:,} episodes",
    advice={
        "reached": "Next: watch the policy: covey eval {run_dir} --render",
        "short": "The policy got better. Next: train for longer: covey train {recipe} --steps {twice_the_steps}",
        "better": "The policy got better. Next: watch it: covey eval {run_dir} --render",
        "worse": "The policy got worse. Next: lower the learning rate: covey train {recipe} --learning-rate 1e-4",
        "unclear": "The intervals overlap, so the change may be chance. Next: try another seed: "
        "covey train {recipe} --seed {next_seed}",
    },
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
        (ENTROPY,),
        (
            Panel("loss/value", "Value loss", "squared return"),
            Panel("kl", "KL to the reference", "nats per decision"),
            Panel("kl/behavior", "KL of an update", "nats per decision"),
        ),
        (Panel("value/explained_variance", "Explained variance of the critic", "share", -1.0, 1.0), DEAD_GROUPS),
    ),
    axes=("episodes", "environment steps", SECONDS),
    counted="episodes",
)

WORLDS: dict[str, Wording] = {"language": LANGUAGE, "control": CONTROL}
