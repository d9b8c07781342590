"""Reports of a comparison as JSON, as Markdown and on the terminal, and its pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure  # without pyplot, which would open windows and keep figures
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullFormatter
from rich.table import Table

from covey.comparison.estimates import (
    DRAWS,
    LAST_STEPS,
    Band,
    SeedRun,
    Threshold,
    find_threshold,
    interquartile_mean_estimate,
    learning_curve,
    metric_curve,
    probability_of_improvement,
)
from covey.config.fields import plural
from covey.tracking.wording import SCORE_KINDS, SECONDS, Wording, number
from covey.tracking.wording import Panel as MetricPanel

CURVES_PICTURE, METRICS_PICTURE, FINAL_PICTURE = "learning_curves.png", "metrics.png", "final_scores.png"
LEAST_SEEDS = 3  # with fewer no difference is claimed
MANY_SEEDS = 10  # with fewer, bootstrap intervals are too narrow
TOO_FEW_SEEDS = "too few seeds to say"


@dataclass(frozen=True)
class Comparison:
    """Finished runs of several recipes on the same problem."""

    subject: str  # their task or environment, "CartPole-v1"
    runs: dict[str, list[SeedRun]]  # label of a recipe -> its seeds, at least one
    threshold: float | None = None  # the score that counts as solved
    failures: dict[str, str] = field(default_factory=dict)  # "cartpole_ppo, seed 3" -> reason
    command: str = ""
    machine: str = ""  # description of the machine that the seconds were measured on

    @property
    def wording(self) -> Wording:
        """The texts for this kind of run."""
        return next(iter(self.runs.values()))[0].wording

    @property
    def evaluated(self) -> bool:
        """True if every seed was evaluated during training; thresholds are then measured by evaluations."""
        return all(bool((~np.isnan(run.evaluations_S[:-1])).any()) for runs in self.runs.values() for run in runs)


def summarise(comparison: Comparison) -> dict[str, Any]:
    """`report.json`: the results as numbers. The cost to reach a threshold is infinite if it was never reached."""
    thresholds = find_thresholds(comparison)
    recipes = {}
    for label, runs in comparison.runs.items():
        finals = [run.final for run in runs]
        worst = min(runs, key=lambda run: run.final)
        shared = [name for name in runs[0].ending if all(name in run.ending for run in runs)]
        recipes[label] = {
            "seeds": len(runs),
            "final": {str(run.seed): run.final for run in runs},
            "mean": float(np.mean(finals)),
            "interquartile_mean": asdict(interquartile_mean_estimate(finals)),
            "worst": {"seed": worst.seed, "score": worst.final},
            "peak_bytes": median(run.peak_bytes for run in runs),
            "seconds": median(float(run.spent[SECONDS][-1]) for run in runs),
            "seconds_per_thousand": median(run.seconds_per_thousand for run in runs),
            "ending": {name: [run.ending[name] for run in runs] for name in shared},
        }
        if label in thresholds:
            recipes[label] |= _describe_thresholds(thresholds[label], comparison.wording)
    return {
        "subject": comparison.subject,
        "score": comparison.wording.kind.name,
        "counted": comparison.wording.counted,
        "final_count": next(iter(comparison.runs.values()))[0].final_count,
        "threshold": comparison.threshold,
        "threshold_measured_by": "evaluation" if comparison.evaluated else "training",
        "recipes": recipes,
        "pairs": [
            pair
            for first, second in combinations(comparison.runs, 2)
            for pair in _compare_pair(comparison, thresholds, first, second)
        ],
        "failures": comparison.failures,
        "command": comparison.command,
        "machine": comparison.machine,
    }


def find_thresholds(comparison: Comparison) -> dict[str, list[Threshold]]:
    """Label -> one entry per seed; empty if the comparison has no threshold."""
    if comparison.threshold is None:
        return {}
    return {
        label: [find_threshold(run, comparison.threshold, evaluated=comparison.evaluated) for run in runs]
        for label, runs in comparison.runs.items()
    }


def _describe_thresholds(found: Sequence[Threshold], wording: Wording) -> dict[str, Any]:
    spent = {axis: [one.spent[axis] for one in found] for axis in wording.axes}
    return {
        "reached": sum(one.reached for one in found),
        "kept": sum(one.kept for one in found),
        "to_threshold": {
            axis: {"median": median(values), "least": min(values), "most": max(values)}
            for axis, values in spent.items()
        },
    }


def _compare_pair(
    comparison: Comparison, thresholds: dict[str, list[Threshold]], first: str, second: str
) -> list[dict[str, Any]]:
    """The probability of improvement by every measure; lower is better in all except the first."""
    runs = comparison.runs
    measures = {
        f"final {comparison.wording.kind.name}": [[run.final for run in runs[label]] for label in (first, second)]
    }
    for axis in comparison.wording.axes if thresholds else ():
        spent = [[-one.spent[axis] for one in thresholds[label]] for label in (first, second)]
        measures[f"{axis} to {comparison.threshold:g}"] = spent
    prices = [[-run.seconds_per_thousand for run in runs[label]] for label in (first, second)]
    measures[f"seconds per 1,000 {comparison.wording.counted}"] = prices
    pairs = []
    for measure, (ours, theirs) in measures.items():
        chance = probability_of_improvement(ours, theirs)
        verdict = _verdict(chance.low, chance.high, first, second, min(len(ours), len(theirs)))
        pairs.append({"first": first, "second": second, "measure": measure, **asdict(chance), "verdict": verdict})
    return pairs


def _verdict(low: float, high: float, first: str, second: str, seeds: int) -> str:
    if seeds < LEAST_SEEDS:
        return TOO_FEW_SEEDS
    if low > 0.5:
        return f"{first} is better"
    if high < 0.5:
        return f"{second} is better"
    return "no difference" if low == high else "no clear difference"


def markdown_report(comparison: Comparison, summary: dict[str, Any]) -> str:
    """`report.md`."""
    labels = list(summary["recipes"])
    seeds = sorted({recipe["seeds"] for recipe in summary["recipes"].values()})
    head = [
        f"# {comparison.subject}: {', '.join(labels)}",
        "",
        f"{' or '.join([*map(str, seeds[:-1]), plural(seeds[-1], 'seed')])} of each recipe"
        + (f", made by `{comparison.command}`." if comparison.command else "."),
        "",
        *[f"- {line}" for line in findings(summary)],
        "",
        f"![learning curves]({CURVES_PICTURE})",
        "",
        f"![other metrics]({METRICS_PICTURE})",
        "",
        f"![final {summary['score']} of each seed]({FINAL_PICTURE})",
    ]
    parts = (_final_section, _threshold_section, _ending_section, _cost_section, _pairs_section)
    sections = [part(summary) for part in parts]
    body = [line for section in sections if section for line in ("", *section)]
    return "\n".join([*head, *body, "", *_how_measured(summary, comparison.wording)]) + "\n"


def findings(summary: dict[str, Any]) -> list[str]:
    """The results in a few sentences: the better recipe by each measure, and the cautions."""
    lines = [
        f"**{name} did not finish** and is left out of every number below: {why}"
        for name, why in summary["failures"].items()
    ]
    if summary["threshold"] is not None:
        for label, recipe in summary["recipes"].items():
            reached, kept, seeds = recipe["reached"], recipe["kept"], recipe["seeds"]
            lines.append(
                f"{label} reached {summary['threshold']:g} with {reached} of {plural(seeds, 'seed')} "
                f"and stayed there with {kept}"
            )
    verdicts: dict[tuple[str, str], dict[str, list[str]]] = {}
    for pair in summary["pairs"]:
        if pair["verdict"] == TOO_FEW_SEEDS:  # a caution says it once, for all pairs
            continue
        both = verdicts.setdefault((pair["first"], pair["second"]), {})
        both.setdefault(pair["verdict"], []).append(pair["measure"])
    for (first, second), found in verdicts.items():
        said = "; ".join(f"{verdict} in {', '.join(measures)}" for verdict, measures in found.items())
        lines.append(f"{first} against {second}: {said}")
    return lines + cautions(summary)


def cautions(summary: dict[str, Any]) -> list[str]:
    """Warnings about conclusions from few seeds."""
    fewest = sorted(recipe["seeds"] for recipe in summary["recipes"].values())[:2]
    if fewest[0] < LEAST_SEEDS:
        return [f"no difference is claimed from fewer than {LEAST_SEEDS} seeds: add some with --seeds"]
    if fewest[0] >= MANY_SEEDS:
        return []
    line = f"intervals from fewer than {MANY_SEEDS} seeds are too narrow"
    by_chance = 2 / math.comb(sum(fewest), fewest[0])
    if summary["pairs"] and by_chance > 0.05:
        line += f"; recipes that are equal are completely apart in one of {round(1 / by_chance)} comparisons so small"
    return [line]


def _section(title: str, text: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A heading, a text if there is one, and a table."""
    table = [head, ["---"] * len(head), *rows]
    lines = [f"| {' | '.join(cells)} |" if cells[0] != "---" else "|---" * len(head) + "|" for cells in table]
    return [f"## {title}", "", *([text, ""] if text else []), *lines]


def _final_section(summary: dict[str, Any]) -> list[str]:
    score = summary["score"]
    write = SCORE_KINDS[score].write
    head = ["recipe", "seeds", "mean", "interquartile mean (95 % interval)", "worst seed", f"{score} of each seed"]
    rows = []
    for label, recipe in summary["recipes"].items():
        middle, worst = recipe["interquartile_mean"], recipe["worst"]
        interval = f"{write(middle['value'])} ({write(middle['low'])} to {write(middle['high'])})"
        finals = ", ".join(map(write, recipe["final"].values()))
        last = f"{write(worst['score'])} (seed {worst['seed']})"
        rows.append([label, str(recipe["seeds"]), write(recipe["mean"]), interval, last, finals])
    return _section(f"Final {score}", "", head, rows)


def _threshold_section(summary: dict[str, Any]) -> list[str]:
    if summary["threshold"] is None:
        return []
    axes = list(next(iter(summary["recipes"].values()))["to_threshold"])
    rows = []
    for label, recipe in summary["recipes"].items():
        spent = [
            "never"
            if math.isinf(one["least"])
            else f"{amount(one['median'])} ({amount(one['least'])} to {amount(one['most'])})"
            for one in recipe["to_threshold"].values()
        ]
        rows.append([label, *(f"{recipe[how]} of {recipe['seeds']}" for how in ("reached", "kept")), *spent])
    text = "Median over seeds (minimum to maximum); a seed that did not reach it counts as never."
    return _section(f"Reaching {summary['threshold']:g}", text, ["recipe", "reached", "and stayed", *axes], rows)


def _ending_section(summary: dict[str, Any]) -> list[str]:
    recipes = summary["recipes"]
    metrics = list(dict.fromkeys(name for recipe in recipes.values() for name in recipe["ending"]))
    if not metrics:
        return []
    rows = [
        [label, *(_over_seeds(recipe["ending"].get(name, [])) for name in metrics)] for label, recipe in recipes.items()
    ]
    text = f"Means over the last {plural(LAST_STEPS, 'step')} and all seeds (lowest to highest seed)."
    return _section("The last steps of training", text, ["recipe", *(f"`{name}`" for name in metrics)], rows)


def _over_seeds(values: Sequence[float]) -> str:
    """'0.28 (0.21 to 0.4)'."""
    if not values:
        return ""
    return f"{number(float(np.mean(values)))} ({number(min(values))} to {number(max(values))})"


def _cost_section(summary: dict[str, Any]) -> list[str]:
    rows = [
        [label, amount(recipe["seconds"]), amount(recipe["seconds_per_thousand"]), _memory(recipe)]
        for label, recipe in summary["recipes"].items()
    ]
    head = ["recipe", "seconds of training", f"seconds per 1,000 {summary['counted']}", "peak memory"]
    return _section("Cost", "", head, rows)


def _memory(recipe: dict[str, Any]) -> str:
    return f"{recipe['peak_bytes'] / 2**20:,.0f} MiB"


def _pairs_section(summary: dict[str, Any]) -> list[str]:
    if not summary["pairs"]:
        return []
    rows = [
        [pair["first"], pair["second"], pair["measure"],
         f"{pair['value']:.2f} ({pair['low']:.2f} to {pair['high']:.2f})", pair["verdict"]]
        for pair in summary["pairs"]
    ]  # fmt: skip
    text = "Probability that a seed of the first recipe beats one of the second, 95 % interval; 0.5 is equal."
    return _section("Probability of improvement", text, ["first", "second", "measure", "chance", "so"], rows)


def _how_measured(summary: dict[str, Any], wording: Wording) -> list[str]:
    score, after = summary["score"], wording.count_measured(summary["final_count"])
    lines = [
        "## How this was measured",
        "",
        f"- The final {score} is the mean of {after} with the trained policy's best actions, after the last step.",
        "- Intervals are percentile bootstraps over seeds (Agarwal et al. 2021, arXiv 2108.13264), "
        f"{DRAWS:,} draws. They cover the variation between seeds, not between tasks. There is no correction for "
        "multiple comparisons.",
        "- A recipe is called better only if the interval of the probability excludes 0.5.",
        "- Seconds are those of training steps; evaluations and checkpoints are left out. Peak memory is that of a "
        "process of its own for each run (of the GPU if there is one), Python and torch included; medians over "
        "seeds.",
    ]
    if summary["threshold"] is not None:
        by_evaluation = summary["threshold_measured_by"] == "evaluation"
        measure = "the evaluations while training" if by_evaluation else wording.training_score
        lines.append(f"- The threshold is compared with {measure}, and at the last step with the final {score}.")
    if summary["machine"]:
        lines.append(f"- Machine: {summary['machine']}.")
    return lines


def terminal_table(summary: dict[str, Any]) -> Table:
    """The report's main numbers, one column per recipe."""
    write = SCORE_KINDS[summary["score"]].write
    recipes = summary["recipes"].values()
    table = Table(title=f"{summary['subject']}: final {summary['score']}", title_style="bold")
    table.add_column()
    for label in summary["recipes"]:
        table.add_column(label, justify="right")
    middles = [recipe["interquartile_mean"] for recipe in recipes]
    table.add_row("seeds", *(str(recipe["seeds"]) for recipe in recipes))
    table.add_row("mean", *(write(recipe["mean"]) for recipe in recipes))
    table.add_row("interquartile mean", *(write(middle["value"]) for middle in middles), style="bold")
    table.add_row("95 % interval", *(f"{write(middle['low'])} to {write(middle['high'])}" for middle in middles))
    table.add_row("worst seed", *(write(recipe["worst"]["score"]) for recipe in recipes))
    if summary["threshold"] is not None:
        goal = f"{summary['threshold']:g}"
        table.add_row(f"seeds that reached {goal}", *(str(recipe["reached"]) for recipe in recipes))
        table.add_row("and stayed there", *(str(recipe["kept"]) for recipe in recipes))
        for axis in next(iter(recipes))["to_threshold"]:
            spent = (amount(recipe["to_threshold"][axis]["median"]) for recipe in recipes)
            table.add_row(f"{axis} to {goal}", *spent)
    prices = (amount(recipe["seconds_per_thousand"]) for recipe in recipes)
    table.add_row(f"seconds per 1,000 {summary['counted']}", *prices)
    table.add_row("peak memory", *map(_memory, recipes))
    return table


def amount(value: float) -> str:
    """A cost as text: 12345.6 as '12,346', 3.14159 as '3.1', infinity as 'never'."""
    if math.isinf(value):
        return "never"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


# ---- pictures ----

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
# Okabe and Ito's colours, safe for colour-blind readers, without yellow and black; line styles differ as well.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = ("o", "D", "s", "^", "v", "P")
LEGEND_CHARACTERS = 150  # characters in a row of the legend
METRIC_COLUMNS = 3  # panels in a row of the picture of metrics
LOGARITHMIC = 20  # an axis is logarithmic if it is this many times longer than the cost of the quickest recipe


def draw_learning_curves(comparison: Comparison, path: Path) -> Path:
    """Draw the training score by episodes, environment steps and seconds, side by side; returns the picture's path.

    Thin: each seed, unsmoothed. Thick: the smoothed interquartile mean over seeds with its 95 % band. A marker on the
    line of the threshold is the median cost at which seeds reached it.
    """
    axes_names = comparison.wording.axes
    what = f"{comparison.wording.kind.name} by cost"
    figure = _canvas(comparison, 5.7, what, threshold=comparison.threshold is not None)
    panels = figure.subplots(1, len(axes_names), sharey=True)
    for panel, axis in zip(panels, axes_names, strict=True):
        _draw_panel(panel, comparison, axis)
    panels[0].set_ylabel(f"{comparison.wording.kind.name} while training, sampled actions", color=MUTED, fontsize=10)
    panels[0].yaxis.set_major_formatter(_score_ticks(comparison))
    seen = np.concatenate(
        [run.returns_S[~np.isnan(run.returns_S)] for runs in comparison.runs.values() for run in runs]
    )
    if len(seen):  # low outliers are cut off, so that they do not compress the other values
        goal = -np.inf if comparison.threshold is None else comparison.threshold
        low, high = np.quantile(seen, 0.01), max(seen.max(), goal)
        panels[0].set_ylim(low - 0.04 * (high - low or 1), high + 0.04 * (high - low or 1))
    figure.savefig(path)
    return path


def _draw_panel(panel: Axes, comparison: Comparison, axis: str) -> None:
    _decorate(panel)
    panel.set_xlabel(axis, color=INK, fontsize=10)
    ends = []
    for place, runs in enumerate(comparison.runs.values()):
        color, style = _look(place)
        faint = _faintness(runs)
        for run in runs:
            known = ~np.isnan(run.returns_S)
            panel.plot(run.spent[axis][known], run.returns_S[known], color=color, alpha=faint, linewidth=0.7, zorder=2)
        band = learning_curve(runs, axis)
        if band is None:
            continue
        ends.append(band.spent_P[-1])
        _draw_band(panel, band, color, style, 2.4)
    reached = _draw_threshold(panel, comparison, axis)
    if ends and max(ends) > LOGARITHMIC * min([*ends, *reached]):
        spent = np.concatenate([run.spent[axis] for runs in comparison.runs.values() for run in runs])
        panel.set_xscale("log")
        panel.set_xlabel(f"{axis} (logarithmic)", color=INK, fontsize=10)
        panel.set_xlim(spent[spent > 0].min(), max(ends) * 1.1)  # the first steps may have no ended episode
    elif ends:
        panel.set_xlim(0, max(ends) * 1.02)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}") if axis == SECONDS else EngFormatter(sep=""))


def draw_metrics(comparison: Comparison, path: Path) -> Path:
    """Draw the metrics of the small panels of a run's picture, over seeds; returns the picture's path.

    Thin: each seed. Thick: the smoothed interquartile mean over seeds with its 95 % band.
    """
    rows = -(-len(comparison.wording.panels) // METRIC_COLUMNS)
    figure = _canvas(comparison, 3.1 * rows + 0.95, "metrics of training", threshold=False)
    places = list(figure.subplots(rows, METRIC_COLUMNS, squeeze=False).flat)
    for panel, candidates in zip(places, comparison.wording.panels, strict=False):
        _draw_metric(panel, comparison, _measured(comparison, candidates))
    for panel in places[len(comparison.wording.panels) :]:
        panel.set_visible(False)
    figure.savefig(path)
    return path


def _measured(comparison: Comparison, candidates: Sequence[MetricPanel]) -> MetricPanel:
    """The first candidate that every recipe measured, or that any did, or the last."""

    def seeds(panel: MetricPanel, runs: Sequence[SeedRun]) -> bool:
        return any(panel.metric in run.drawn and not np.isnan(run.drawn[panel.metric]).all() for run in runs)

    groups = comparison.runs.values()
    by_all = [panel for panel in candidates if all(seeds(panel, runs) for runs in groups)]
    by_any = [panel for panel in candidates if any(seeds(panel, runs) for runs in groups)]
    return (by_all or by_any or list(candidates)[-1:])[0]


def _draw_metric(panel: Axes, comparison: Comparison, shown: MetricPanel) -> None:
    """Draw one metric by training steps, in control by environment steps."""
    axis = comparison.wording.axes[0 if comparison.wording.x_metric == "step" else 1]
    _decorate(panel)
    panel.set_title(shown.title, loc="left", fontsize=11, color=INK)
    panel.set_ylabel(shown.unit, color=MUTED, fontsize=9)
    panel.set_xlabel(axis, color=MUTED, fontsize=9)
    known = False
    for place, runs in enumerate(comparison.runs.values()):
        color, style = _look(place)
        for run in runs:
            if shown.metric in run.drawn:
                panel.plot(run.spent[axis], run.drawn[shown.metric], color=color, alpha=_faintness(runs),
                           linewidth=0.7, zorder=2)  # fmt: skip
        band = metric_curve(runs, shown.metric, axis)
        if band is None:
            continue
        known = True
        _draw_band(panel, band, color, style, 2.2)
    if not known:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color=MUTED, fontsize=9)
    panel.set_ylim(shown.low, shown.high)
    panel.set_xlim(left=0)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_band(panel: Axes, band: Band, color: str, style: Any, width: float) -> None:
    panel.fill_between(band.spent_P, band.low_P, band.high_P, color=color, alpha=0.2, linewidth=0, zorder=3)
    panel.plot(band.spent_P, band.middle_P, color=color, linestyle=style, linewidth=width, zorder=5)


def _faintness(runs: Sequence[SeedRun]) -> float:
    """Opacity of a seed's line: fainter with many seeds and steps, which overlap, so that the means remain visible."""
    return max(0.025, 0.5 / len(runs) ** 0.5 * min(1.0, 100 / len(runs[0].returns_S)))


def _draw_threshold(panel: Axes, comparison: Comparison, axis: str) -> list[float]:
    """Draw the dashed line and on it each recipe's median cost to reach it; returns these costs."""
    reached: list[float] = []
    if comparison.threshold is None:
        return reached
    panel.axhline(comparison.threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=4)
    for place, found in enumerate(find_thresholds(comparison).values()):
        middle = float(np.median([one.spent[axis] for one in found]))
        if np.isfinite(middle):
            reached.append(middle)
            panel.plot(middle, comparison.threshold, MARKERS[place % len(MARKERS)], color=_look(place)[0],
                       markersize=9, markeredgecolor="white", markeredgewidth=1.3, zorder=7, clip_on=False)  # fmt: skip
    return reached


def draw_final_scores(comparison: Comparison, path: Path) -> Path:
    """Draw every seed's final score, and the interquartile mean with its 95 % interval; returns the picture's path."""
    runs, kind = comparison.runs, comparison.wording.kind
    figure = Figure(figsize=(9, 1.9 + 0.85 * len(runs)), dpi=150, facecolor="white", layout="constrained")
    panel = figure.subplots()
    _decorate(panel, grid="x")
    for place, seeds in enumerate(runs.values()):
        color, _ = _look(place)
        finals = np.array([run.final for run in seeds])
        middle = interquartile_mean_estimate(finals)
        heights = place + 0.2 + 0.24 * _spread(len(finals))
        panel.plot(finals, heights, "o", color=color, alpha=0.6, markersize=6, markeredgewidth=0, zorder=3)
        panel.plot([middle.low, middle.high], [place - 0.2] * 2, color=color, linewidth=3,
                   solid_capstyle="butt", zorder=4)  # fmt: skip
        panel.plot(middle.value, place - 0.2, "D", color=color, markersize=9, markeredgecolor="white", zorder=5)
        panel.annotate(kind.write(middle.value), (middle.value, place - 0.2), xytext=(0, 9), ha="center",
                       textcoords="offset points", fontsize=9.5, fontweight="bold", color=color)  # fmt: skip
    if comparison.threshold is not None:
        panel.axvline(comparison.threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    panel.set_yticks(range(len(runs)), list(runs), color=INK, fontsize=10)
    panel.set_ylim(len(runs) - 0.4, -0.6)
    panel.margins(x=0.06)
    count = next(iter(runs.values()))[0].final_count
    what = comparison.wording.count_measured(count)
    panel.set_xlabel(f"final {comparison.wording.kind.name}, mean of {what}", color=INK, fontsize=10)
    panel.xaxis.set_major_formatter(_score_ticks(comparison))
    panel.set_title(f"{comparison.subject}: final score of each seed", loc="left", fontsize=13, fontweight="bold",
                    color=INK, pad=22)  # fmt: skip
    panel.text(0, 1.03, "dots: seeds; diamond and bar: interquartile mean and its 95 % interval",
               transform=panel.transAxes, color=MUTED, fontsize=9.5, va="bottom")  # fmt: skip
    figure.savefig(path)
    return path


def _spread(count: int) -> np.ndarray:
    """Vertical offsets of dots that avoid overlap, the same in every picture."""
    return (np.arange(count) * 0.618034 % 1) - 0.5


def _score_ticks(comparison: Comparison) -> FuncFormatter:
    return FuncFormatter(lambda value, _: comparison.wording.kind.write_tick(value))


def _canvas(comparison: Comparison, height: float, what: str, *, threshold: bool) -> Figure:
    """A figure with title, note and legend above its panels, which take `height` inches."""
    columns = max(1, min(len(comparison.runs), LEGEND_CHARACTERS // (8 + max(map(len, comparison.runs)))))
    rows = -(-len(comparison.runs) // columns)
    height += 0.25 * rows
    figure = Figure(figsize=(14, height), dpi=150, facecolor="white")
    head = 0.72 + 0.27 * rows  # inches for title, note and legend
    rect = (0.008, 0.01, 0.984, 0.99 - head / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, wspace=0.04, hspace=0.06))
    counts = sorted({len(runs) for runs in comparison.runs.values()})
    note = (
        f"{' or '.join([*map(str, counts[:-1]), plural(counts[-1], 'seed')])} each. Thin: every seed, unsmoothed. "
        "Thick: smoothed interquartile mean; band: its 95 % bootstrap interval over seeds."
    )
    if threshold:
        note += f" Marker: median seed reaches {comparison.threshold:g}."
    inch = 1 / figure.get_figheight()
    figure.text(
        0.012, 1 - 0.14 * inch, f"{comparison.subject}: {what}", fontsize=15, fontweight="bold", color=INK, va="top"
    )
    figure.text(0.012, 1 - 0.46 * inch, note, fontsize=10, color=MUTED, va="top")
    handles = []
    for place, label in enumerate(comparison.runs):
        color, style = _look(place)
        marker = MARKERS[place % len(MARKERS)] if threshold else ""
        handles.append(Line2D([], [], color=color, linestyle=style, linewidth=2.4, marker=marker, markersize=7,
                              markeredgecolor="white", label=label))  # fmt: skip
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.008, 1 - 0.66 * inch), ncols=columns,
                  frameon=False, fontsize=10.5, labelcolor=INK, handlelength=3, borderpad=0.2)  # fmt: skip
    return figure


def _look(place: int) -> tuple[str, Any]:
    """Colour and line style of the recipe with this place."""
    return COLORS[place % len(COLORS)], STYLES[place % len(STYLES)]


def _decorate(axes: Axes, grid: str = "y") -> None:
    """Format the axes: no frame, a light grid."""
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
