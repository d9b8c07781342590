"""Reports of a comparison as JSON, as Markdown and on the terminal."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from covey.comparison.estimates import (
    DRAWS,
    LAST_STEPS,
    SeedRun,
    Threshold,
    find_threshold,
    interquartile_mean_estimate,
    probability_of_improvement,
)
from covey.config.fields import plural
from covey.tracking.wording import SCORE_KINDS, SECONDS, Wording, number

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
