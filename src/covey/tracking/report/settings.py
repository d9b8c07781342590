"""The sections on how a run was made: settings, machine, the command to repeat it, iterations of a reward model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from covey.config.fields import iter_fields
from covey.tracking.report.html import Html, element, section, table
from covey.tracking.report.run_data import RunData, flat
from covey.tracking.run_reader import number
from covey.tracking.run_reader import table as entries

LONGEST_VALUE = 400  # characters of a setting
MOST_SETTINGS = 500
MOST_ITERATIONS = 50
OWN = {"run_dir"}  # differs between all runs


def config_section(run: RunData, level: int) -> Html:
    """Every setting; those that differ from their defaults first."""
    if not run.tables:
        return section("Settings", element("p", "config.toml is missing or damaged.", class_="note"), level=level)
    values = {name: value for name, value in flat(run.tables).items() if name not in OWN}
    defaults = _defaults(run)
    changed = [name for name in values if name not in defaults or values[name] != defaults[name]]
    usual = [name for name in values if name not in changed]
    rows = [[element("code", name), _shown(values[name]), _shown(defaults[name]) if name in defaults else "-"]
            for name in changed[:MOST_SETTINGS]]  # fmt: skip
    others = [[element("code", name), _shown(values[name])] for name in usual[:MOST_SETTINGS]]
    return section(
        "Settings",
        element("p", "Settings that differ from covey's defaults:", class_="note"),
        table(("field", "value", "default"), rows),
        element("details", element("summary", f"{len(usual)} settings with their defaults"),
                table(("field", "value"), others)) if others else None,
        _left_out(max(0, len(changed) - MOST_SETTINGS) + max(0, len(usual) - MOST_SETTINGS), "settings"),
        level=level,
    )  # fmt: skip


def differences_section(runs: Sequence[RunData]) -> Html:
    """The settings in which runs differ."""
    tables = [flat(run.tables) for run in runs]
    names = [name for name in dict.fromkeys(name for one in tables for name in one) if name not in OWN]
    differing = [name for name in names if len({_shown(one.get(name)) for one in tables}) > 1]
    if not differing:
        return section("Settings that differ", element("p", "The runs have the same settings.", class_="note"))
    rows = [
        [element("code", name), *(_shown(one[name]) if name in one else "-" for one in tables)]
        for name in differing[:MOST_SETTINGS]
    ]
    return section("Settings that differ", table(("field", *(run.name for run in runs)), rows),
                   _left_out(len(differing) - MOST_SETTINGS, "settings"))  # fmt: skip


def machine_section(run: RunData, level: int) -> Html:
    """Versions and hardware."""
    rows = [[name, _shown(value)] for name, value in flat(run.machine).items()]
    peak = number(run.summary.get("peak_memory_bytes")) or max(run.points("memory/peak_bytes")[1], default=0.0)
    rows += [["peak memory", f"{peak / 2**30:.1f} GiB"]] if peak else []
    if not rows:
        return section("Environment", element("p", "It is not recorded.", class_="note"), level=level)
    return section("Environment", table(("part", "version or value"), rows[:100]), level=level)


def reproduce_section(run: RunData, level: int) -> Html:
    """The command that trains the same again."""
    if not run.reproduce:
        return section(
            "To repeat it", element("p", "How the run was started is not recorded.", class_="note"), level=level
        )
    note = "With the same versions, files and kind of machine, the result is bitwise the same."
    return section(
        "To repeat it",
        element("pre", run.reproduce, class_="command"),
        element("p", note, class_="note"),
        level=level,
    )


def iterations_section(run: RunData, level: int) -> Html | None:
    """The trainings of the reward model of an iterative run; None for other runs."""
    iterations = run.reader.iterations()
    if not iterations:
        return None
    rows = []
    for place, record in enumerate(iterations[:MOST_ITERATIONS], start=1):
        before, after = (number(entries(record.get(when)).get("rank_agreement")) for when in ("before", "after"))
        rows.append([str(place), _shown(record.get("step")), _plain(before), _plain(after)])
    head = ("iteration", "step", "rank agreement before its training", "after it")
    note = (
        "Rank agreement: how often the reward model scores a right completion of the current policy above a wrong one."
    )
    return section("Trainings of the reward model", element("p", note, class_="note"),
                   table(head, rows, numbers=(0, 1, 2, 3)), _left_out(len(iterations) - MOST_ITERATIONS, "iterations"),
                   level=level)  # fmt: skip


def _defaults(run: RunData) -> dict[str, Any]:
    """The default of every field of the run's config; {} if this version cannot read it."""
    if run.config is None:
        return {}
    plain = ((name, item.default) for name, item, _, _ in iter_fields(run.config))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain}


def _shown(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= LONGEST_VALUE else f"{shown[:LONGEST_VALUE]} ..."


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _left_out(count: int, what: str) -> Html | None:
    return element("p", f"{count:,} more {what} are left out.", class_="note") if count > 0 else None
