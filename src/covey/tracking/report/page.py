"""The whole report: one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from covey.config.fields import plural
from covey.tracking.console import clock
from covey.tracking.report.html import Html, element, joined
from covey.tracking.report.result import (
    comparison_section,
    curves_section,
    diagnosis_section,
    result_section,
)
from covey.tracking.report.run_data import RunData, unique_names
from covey.tracking.report.samples import answers_section, groups_section
from covey.tracking.report.settings import (
    config_section,
    differences_section,
    iterations_section,
    machine_section,
    reproduce_section,
)
from covey.tracking.report.style import STYLE
from covey.tracking.run_folder import write_atomically

MOST_RUNS = 24  # of a report
GENERATOR = "covey report"
# Nothing is loaded and nothing runs: styles are in the page itself.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(runs: Sequence[tuple[Path, str]], file: Path, title: str = "") -> Path:
    """Write the report of some runs; returns the file's path.

    Args:
        runs: the folder of each run, and the command that trains the same again (empty if unknown).
        file: the HTML file; an existing one is replaced.
        title: the title; by default the names of the runs.

    Raises:
        MachineError: if the file cannot be written.
    """
    names = unique_names([folder for folder, _ in runs])
    read = [RunData(folder, name, command, place) for place, ((folder, command), name) in enumerate(
        zip(runs, names, strict=True))]  # fmt: skip
    write_atomically(file, render(read, title).encode())
    return file


def is_report(file: Path) -> bool:
    """True if the file is a report, which a newer one may replace.

    Raises:
        OSError: if it cannot be read.
    """
    with open(file, "rb") as opened:
        return f'name="generator" content="{GENERATOR}"'.encode() in opened.read(2000)


def render(runs: Sequence[RunData], title: str = "", now: datetime | None = None) -> Html:
    """The page."""
    title = title or (
        runs[0].name if len(runs) == 1 else f"{plural(len(runs), 'run')}: {', '.join(r.name for r in runs)}"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title[:200]),
        element("style", Html(STYLE)),
    )
    body = _one_run(runs[0], title) if len(runs) == 1 else _several_runs(runs, title)
    return joined([Html("<!DOCTYPE html>\n"),
                   element("html", head, element("body", body, _footer(now)), lang="en"), Html("\n")])  # fmt: skip


def _one_run(run: RunData, title: str) -> Html:
    return joined(
        [element("header", element("h1", title), _facts(run)), element("main", _parts(run, level=2, groups=3))]
    )


def _several_runs(runs: Sequence[RunData], title: str) -> Html:
    groups = 2 if len(runs) <= 6 else 1
    details = [
        element("section", element("h2", run.name), _facts(run), _parts(run, level=3, groups=groups), id_=run.anchor)
        for run in runs
    ]
    top = element("header", element("h1", title))
    return joined([top, element("main", comparison_section(runs), differences_section(runs), *details)])


def _parts(run: RunData, level: int, groups: int) -> Html:
    """The sections of a run."""
    return joined([
        result_section(run, level),
        diagnosis_section(run, level),
        curves_section([run], level),
        iterations_section(run, level),
        answers_section(run, level),
        groups_section(run, level, groups),
        config_section(run, level),
        machine_section(run, level),
        reproduce_section(run, level),
    ])  # fmt: skip


def _facts(run: RunData) -> Html:
    """State, algorithm, model and cost of a run."""
    planned = run.tables.get("steps")
    steps = f"{run.metrics.last_step:,}" + (f" of {planned:,}" if type(planned) is int else "")
    environment = run.tables.get("environment")
    subject = run.tables.get("model") or (environment.get("id") if isinstance(environment, dict) else None)
    facts = [
        ("recipe", run.recipe),
        ("algorithm", run.tables.get("algorithm")),
        ("environment" if environment else "model", subject),
        ("seed", run.tables.get("seed")),
        ("steps", steps),
        ("time", None if run.seconds is None else clock(run.seconds)),
    ]
    known = [
        element("li", f"{name} ", element("b", str(value)[:200])) for name, value in facts if value not in (None, "")
    ]
    return element("ul", element("li", element("span", run.state, class_=f"badge {run.state}")), *known, class_="facts")


def _footer(now: datetime | None) -> Html:
    written = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    words = (
        f"Written by covey {version('covey')} on {written}. Long texts are cut, and groups and answers are selected; "
        "all of them are in the run folders (covey show, covey runs export)."
    )
    return element("footer", element("p", words, class_="note"))
