"""The sections on the outcome of a run: results, diagnosis, curves, and the comparison of several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from covey.config.fields import plural
from covey.tracking.console import clock, count_of_kind
from covey.tracking.diagnosis import CHECKS, Finding
from covey.tracking.diagnosis.finding import sentence
from covey.tracking.report.charts import COLORS, Axes, Interval, Line, chart
from covey.tracking.report.completions import one_line
from covey.tracking.report.html import Html, element, section, table
from covey.tracking.report.run_data import RunData
from covey.tracking.report.samples import unit_of
from covey.tracking.run_reader import number
from covey.tracking.score_kinds import axis_tick, is_above

WIDE, NARROW, SMALL = (760.0, 300.0), (400.0, 260.0), (340.0, 190.0)  # of charts, in points
MOST_PANELS = 24
MOST_KINDS = 100  # of problems
# Metrics of the small charts: title, unit ({unit} is a token or an action), limits. Those that no run has are left out.
PANELS: tuple[tuple[str, str, str, tuple[float | None, float | None]], ...] = (
    ("reward/mean", "Reward", "mean of a step", (None, None)),
    ("reward/std", "Spread of rewards", "standard deviation", (0, None)),
    ("groups/zero_advantage_fraction", "Groups without signal", "fraction", (0, 1)),
    ("entropy", "Entropy", "nats per {unit}", (None, None)),
    ("kl", "KL to the reference", "nats per {unit}", (None, None)),
    ("kl/behavior", "KL of an update", "nats per {unit}", (0, None)),
    ("length/mean", "Length", "{unit}s", (0, None)),
    ("length/truncated_fraction", "Truncated rollouts", "fraction", (0, 1)),
    ("grad_norm", "Gradient norm", "before clipping", (0, None)),
    ("clip/low", "Clipped from below", "fraction of {unit}s", (0, None)),
    ("clip/high", "Clipped from above", "fraction of {unit}s", (0, None)),
    ("value/explained_variance", "Explained variance of the critic", "fraction", (-1, 1)),
    ("loss/value", "Value loss", "", (0, None)),
    ("learning_rate", "Learning rate", "", (0, None)),
    ("time/step", "Time of a step", "seconds", (0, None)),
    ("decisions_per_second", "Throughput", "{unit}s per second", (0, None)),
)


def result_section(run: RunData, level: int) -> Html:
    """Scores before and after training with their intervals."""
    if not run.evaluations:
        return section("Result", element("p", "There is no evaluation yet.", class_="note"), level=level)
    kind, rows = run.wording.kind, []
    for evaluation in run.evaluations:
        before, after = evaluation["before"], evaluation["after"]
        rows.append([
            _case(run, evaluation), _written(run, before), _written(run, after), _change(run, before, after)
        ])  # fmt: skip
    ended = run.state == "finished"
    head = (run.wording.case, "before", "after" if ended else "last evaluation so far", "change")
    counts = {int(one["count"]) for e in run.evaluations for one in (e["before"], e["after"]) if one and one["count"]}
    of = f", on {run.wording.count_measured(max(counts))}" if counts else ""
    note = f"{kind.name.capitalize()}{of}, with 95 % intervals."
    return section(
        "Result",
        element("p", verdict_text(run), class_="headline"),
        table(head, rows, numbers=(1, 2, 3)),
        element("p", note, class_="note"),
        _by_kind(run, head[2]),
        level=level,
    )


def _by_kind(run: RunData, after: str) -> Html | None:
    """The scores of every kind of problem at the token limit of training; None if there are no kinds."""
    kinds = run.evaluations[0]["kinds"]
    if not kinds:
        return None
    rows = [
        [
            one_line(each["kind"]), count_of_kind(each),
            _written(run, each["before"]), _written(run, each["after"]), _change(run, each["before"], each["after"]),
        ]
        for each in kinds[:MOST_KINDS]
    ]  # fmt: skip
    head = ("kind of problem", "problems", "before", after, "change")
    left = len(kinds) - MOST_KINDS
    more = element("p", f"... {plural(left, 'more kind')}", class_="muted") if left > 0 else None
    return element("div", table(head, rows, numbers=(1, 2, 3, 4)), more)


def verdict_text(run: RunData) -> Html:
    """The outcome in one sentence."""
    first = run.evaluations[0] if run.evaluations else {"before": None, "after": None}
    before, after, kind = first["before"], first["after"], run.wording.kind
    if before is None or after is None:
        return element("span", "There is no evaluation after training yet.")
    expected = number(run.summary.get("expected_return"))
    parts: list[Html | str] = []
    numbers = f"from {kind.write(before['score'])} to {kind.write(after['score'])}"
    ended = "" if run.state == "finished" else " so far"
    if is_above(after, before):
        parts.append(element("span", f"Better{ended}: {numbers}.", class_="good"))
    elif is_above(before, after):
        parts.append(element("span", f"Worse{ended}: {numbers}.", class_="bad"))
    else:
        parts.append(f"No certain change{ended}: {numbers}; the intervals overlap.")
    if expected is not None and ended == "":
        reached = "is reached" if after["score"] >= expected else "is not reached"
        parts.append(f" The expected {kind.name} of {kind.write(expected)} {reached}.")
    return element("span", *parts)


def diagnosis_section(run: RunData, level: int) -> Html:
    """The findings of the checks."""
    if not run.metrics.steps:
        return section("Diagnosis", element("p", "No step is recorded yet.", class_="note"), level=level)
    if not run.findings:
        fine = f"{plural(len(CHECKS), 'check')} over {plural(len(run.metrics.steps), 'step')} found nothing."
        return section("Diagnosis", element("div", element("p", fine), class_="finding fine"), level=level)
    return section("Diagnosis", *map(_finding, run.findings), level=level)


def curves_section(runs: Sequence[RunData], level: int = 3) -> Html:
    """The curves of one run, or of several over each other."""
    if not any(run.metrics.steps for run in runs):
        return section("Curves", element("p", "No step is recorded yet.", class_="note"), level=level)
    alone = len(runs) == 1
    name = "score/mean" if any(run.points("score/mean")[0] for run in runs) else "reward/mean"
    x_metric, x_label, label, tick, low = _main_axes(runs, name)
    prefix = "-".join(run.anchor for run in runs)
    expected = number(runs[0].summary.get("expected_return")) if alone or _domains(runs) == {"control"} else None
    lines, intervals = _main_lines(runs, name, x_metric)
    axes = Axes(x_label, tick, (low, None), expected)
    title = f"{label.capitalize()} while training"
    figure = element(
        "figure",
        element("figcaption", title),
        element("div", chart(lines, axes, WIDE, f"{title}, {prefix}", intervals), class_="wide"),
        element("div", chart(lines, axes, NARROW, f"{title}, {prefix}, narrow", intervals), class_="narrow"),
    )
    panels = [panel for panel in _panels(runs, prefix, name) if panel is not None]
    return section("Curves", _legend(runs[0], label, expected) if alone else run_legend(runs), figure,
                   element("div", *panels, class_="charts"), level=level)  # fmt: skip


def _domains(runs: Sequence[RunData]) -> set[str]:
    return {run.wording.domain for run in runs}


def _main_axes(runs: Sequence[RunData], name: str) -> tuple[str, str, str, Callable[[float], str], float | None]:
    """The x axis of the large chart, its label, and the name, ticks and lower limit of the y axis."""
    wording = runs[0].wording
    x_metric, x_label = (wording.x_metric, wording.x_label) if len(_domains(runs)) == 1 else ("step", "training step")
    if name != "score/mean":
        return x_metric, x_label, "reward", axis_tick, None
    if len({run.wording.kind.name for run in runs}) > 1:
        return x_metric, x_label, "score of each run's own kind", axis_tick, None
    return x_metric, x_label, wording.kind.name, wording.kind.write_tick, 0.0 if wording.kind.limits else None


def run_legend(runs: Sequence[RunData]) -> Html:
    """The colours of the runs."""
    return element("ul", *(element("li", _mark(run.color), run.name) for run in runs), class_="legend")


def comparison_section(runs: Sequence[RunData]) -> Html:
    """A table of the runs, their curves over each other."""
    rows: list[list[Any]] = []
    for run in runs:
        first = run.evaluations[0] if run.evaluations else {"before": None, "after": None}
        seconds = run.seconds
        rows.append([
            element("span", _mark(run.color), element("a", run.name, href=f"#{run.anchor}")),
            element("span", run.state, class_=f"badge {run.state}"),
            str(run.tables.get("algorithm", "-")),
            str(run.tables.get("seed", "-")),
            f"{run.metrics.last_step:,}",
            _written(run, first["before"]),
            _written(run, first["after"]),
            _change(run, first["before"], first["after"]),
            "-" if seconds is None else clock(seconds),
        ])  # fmt: skip
    head = ("run", "state", "algorithm", "seed", "steps", "before", "after or so far", "change", "time")
    return element("div", table(head, rows, numbers=(3, 4, 5, 6, 7, 8)), curves_section(runs, level=2))


def _case(run: RunData, evaluation: dict[str, Any]) -> str:
    if run.wording.domain == "control":
        environment = run.tables.get("environment")
        return str(run.summary.get("environment") or (environment or {}).get("id", "-"))
    limit = number(evaluation.get("max_new_tokens"))
    return "-" if limit is None else f"{limit:,.0f}"


def _written(run: RunData, result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    return run.wording.kind.write_interval(result)


def _change(run: RunData, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Html | str:
    if before is None or after is None:
        return "-"
    style = "good" if is_above(after, before) else "bad" if is_above(before, after) else None
    return element("span", run.wording.kind.write_change(after["score"] - before["score"]), class_=style)


def _finding(finding: Finding) -> Html:
    steps = f"steps {finding.first_step:,} to {finding.last_step:,}"
    return element(
        "div",
        element(
            "p",
            element("b", f"{finding.severity.capitalize()}: {finding.check}"),
            element("span", f", {steps}", class_="muted"),
        ),
        element("p", sentence(finding.evidence)),
        element("p", sentence(finding.explanation), class_="muted"),
        element("p", element("b", sentence(finding.remedy))),
        class_=f"finding {'problem' if finding.severity == 'problem' else 'warning'}",
    )


def _main_lines(runs: Sequence[RunData], name: str, x_metric: str) -> tuple[list[Line], list[Interval]]:
    lines, intervals = [], []
    for run in runs:
        lines.append(Line(*run.points(name, x_metric), run.color))
        color = 1 if len(runs) == 1 else run.color
        if name != "score/mean":
            continue
        x, _ = run.points(name, x_metric)
        if len(runs) == 1:
            lines.append(Line(*_evaluated(run, x_metric), color, points=True))
        for result, place in _ends(run):
            at = 0.0 if place == "before" else max(x, default=0.0)
            if len(runs) == 1 or place == "after":
                intervals.append(Interval(at, result["score"], result["low"], result["high"], color))
    return [line for line in lines if line.x], intervals


def _evaluated(run: RunData, x_metric: str) -> tuple[Sequence[float], Sequence[float]]:
    """The evaluations during training, and the one before it at 0."""
    x, scores = run.points("eval/score", x_metric)
    before = [result["score"] for result, place in _ends(run) if place == "before" and x]
    return [*(0.0 for _ in before), *x], [*before, *scores]


def _ends(run: RunData) -> list[tuple[dict[str, Any], str]]:
    """The first evaluation before training and, if the run has ended, after it."""
    first = run.evaluations[0] if run.evaluations else {}
    places = ("before", "after") if run.state == "finished" else ("before",)
    return [(first[place], place) for place in places if first.get(place) is not None]


def _panels(runs: Sequence[RunData], prefix: str, drawn: str) -> list[Html | None]:
    known = {name for name, *_ in PANELS}
    parts = sorted({
        name for run in runs for name in run.metrics.columns
        if name.startswith("reward/") and name not in known and name.count("/") == 1
    })  # fmt: skip
    panels = list(PANELS) + [
        (name, f"Reward {name.partition('/')[2]}", "mean of a step", (None, None)) for name in parts
    ]
    panels = [panel for panel in panels if panel[0] != drawn]
    return [_panel(runs, prefix, *panel) for panel in panels[:MOST_PANELS]]


def _panel(
    runs: Sequence[RunData], prefix: str, name: str, title: str, unit: str, limits: tuple[float | None, float | None]
) -> Html | None:
    x_metric = runs[0].wording.x_metric if len(_domains(runs)) == 1 else "step"
    found = [Line(*run.points(name, x_metric), run.color, exact=name == "learning_rate") for run in runs]
    lines = [line for line in found if line.x and any(value != line.y[0] for value in line.y)]
    if not lines:
        return None
    unit = unit.format(unit=unit_of(runs[0]))
    caption = element("figcaption", title, element("span", f" {unit}") if unit else None)
    axes = Axes(tick=axis_tick, limits=limits)
    return element("figure", caption, chart(lines, axes, SMALL, f"{title}, {prefix}"))


def _legend(run: RunData, label: str, expected: float | None) -> Html:
    items = [element("li", _mark(run.color), f"training {label}: thin each step, thick the running mean")]
    if run.evaluations or run.points("eval/score")[0]:
        items.append(element("li", element("i", class_="mark dot c2"), "evaluations, with 95 % intervals at both ends"))
    if expected is not None:
        items.append(element("li", f"dashed: expected {label}, {run.wording.kind.write(expected)}"))
    return element("ul", *items, class_="legend")


def _mark(color: int) -> Html:
    return element("i", class_=f"mark c{color % COLORS + 1}")
