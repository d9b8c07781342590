"""The pages of docs/reference, made from the tables of the code: written by

    PYTHONPATH=tests .venv/bin/python -m helpers.reference

tests/docs/test_reference.py compares them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from covey.cli.main import COMMANDS, build_parser
from covey.config import ControlConfig, RunConfig
from covey.config.recipe import (
    PACKAGED_RECIPES,
    describe_fields,
    describe_recipe,
    foreign_names,
    packaged_recipes,
    read_tables,
    root_of,
)
from covey.tracking.metrics import METRICS
from helpers.diagnosis_records import alarms_table, checks_table, runs_table

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
WORLDS = {RunConfig: "Language models", ControlConfig: "Agents in environments"}

METRICS_HEAD = """# Metrics

The meaning of each number in `metrics.jsonl`, and its values in a healthy run. One line of that file is one training
step; a number that a run does not have is left out. A decision is a token of a language model, an action in control.
An asterisk marks a number that differs when a run is repeated.

**Is a loss of 0 a bug?** No. With one optimizer step for each batch of rollouts (`epochs = 1`, `minibatches = 1`) the
ratio is exactly 1, nothing is clipped, and the advantages of a group sum to 0, so the loss is near 0 while its gradient
is not. Read `reward/mean`, `score/mean` and `grad_norm` instead.

`covey diagnose RUN` checks these metrics for known faults: [checks](checks.md).
"""
FIELDS_HEAD = """# Fields of a recipe

A recipe is a TOML file. The headings are its tables; a field is an option of `covey train` too, `--field VALUE` or,
where two tables have it, `--table.field VALUE`. `covey train --help-all` prints this page. An empty default means that
the field is unset, and the meaning says what follows.
"""
RECIPES_HEAD = """# Packaged recipes

`covey train NAME` runs one, `covey recipes NAME > my.toml` prints it to be changed.
"""
CHECKS_HEAD = """# Checks of the diagnosis

[healthy.md](../healthy.md) explains how to read the findings.

Windows: the *start* of a metric is the median of its first 5 values, its *level* the median of its last 10. A metric
*rises* or *falls* if level and start differ by more than 3 standard errors, which are estimated by the median absolute
deviation of both windows. No level is compared with a start before the metric has 20 values. The checks are evaluated
every 5 steps.
"""
ALARMS_HEAD = """
## False alarms

The checks must be silent in all healthy runs, and each must find its sick run. Other checks may find something there as
well.
"""
RUNS_HEAD = """
## The healthy runs

Training score, mean of the first and of the last five steps. `tests/tracking/diagnosis` has the records.
"""
NAMES_HEAD = """# Names of other libraries

As an option or a field, each of these names is answered with covey's. [migrate.md](../migrate.md) has the differences
in meaning.
"""
LIBRARIES = ("TRL", "verl", "OpenRLHF", "Unsloth", "vLLM", "stable-baselines3", "cleanrl")
COMMANDS_HEAD = """# Commands

`covey COMMAND --help` prints the same. Commands that take fields of a recipe as options say so; the fields are in
[fields.md](fields.md).
"""


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def metrics() -> str:
    rows = (
        (f"`{one.name}`{'' if one.reproducible else ' *'}", one.unit, one.meaning, one.healthy)
        for one in METRICS.values()
    )
    return METRICS_HEAD + table(("metric", "unit", "meaning", "a healthy run"), rows)


def fields() -> str:
    text = FIELDS_HEAD
    for root, world in WORLDS.items():
        text += f"\n## {world}\n"
        for section, found in groupby(describe_fields(root), lambda row: row.section):
            rows = ((f"`{row.name}`", row.type, f"`{row.default}`" if row.default else "", row.text) for row in found)
            text += f"\n### {world}: {f'[{section}]' if section else 'top level'}\n"
            text += table(("field", "type", "default", "meaning"), rows)
    return text


def recipes() -> str:
    text = RECIPES_HEAD
    named = {name: root_of(read_tables(PACKAGED_RECIPES / f"{name}.toml")) for name in packaged_recipes()}
    for root, world in WORLDS.items():
        rows = ((f"`{name}`", describe_recipe(name)) for name, its_root in named.items() if its_root is root)
        text += f"\n## {world}\n" + table(("recipe", "what it trains"), rows)
    return text


def checks() -> str:
    return CHECKS_HEAD + "\n" + checks_table() + ALARMS_HEAD + "\n" + alarms_table() + RUNS_HEAD + "\n" + runs_table()


def names() -> str:
    text = NAMES_HEAD
    for library in LIBRARIES:
        found = {name: one for name, one in foreign_names().items() if library in one.libraries.split(", ")}
        rows = ((f"`{name}`", ", ".join(f"`{field}`" for field in one.fields), one.note) for name, one in found.items())
        text += f"\n## {library}\n" + table((library, "covey", "difference, or why there is none"), rows)
    return text


def commands() -> str:
    _, parsers = build_parser()
    text = COMMANDS_HEAD
    for command in COMMANDS.values():
        text += _command(command.name, command.summary, command.takes_fields, parsers)
        for action in command.actions:
            text += _command(f"{command.name} {action.name}", action.summary, action.takes_fields, parsers)
    return text


def _command(name: str, summary: str, takes_fields: bool, parsers: dict[str, argparse.ArgumentParser]) -> str:
    also = " Takes fields of a recipe as options." if takes_fields else ""
    shown = [
        one for one in parsers[name]._actions if one.help != argparse.SUPPRESS and one.dest not in ("help", "debug")
    ]
    rows = [(_words(one), str(one.help)) for one in shown if not isinstance(one, argparse._SubParsersAction)]
    options = table(("argument", "meaning"), iter(rows)) if rows else ""
    return f"\n## covey {name}\n\n{summary[0].upper()}{summary[1:]}.{also}\n{options}"


def _words(action: argparse.Action) -> str:
    value = "|".join(map(str, action.choices)) if action.choices else action.metavar
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{'' if action.nargs == 0 else f' {value or action.dest.upper()}'}`"


PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics, "fields.md": fields, "recipes.md": recipes, "checks.md": checks, "commands.md": commands,
    "names.md": names,
}  # fmt: skip

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
