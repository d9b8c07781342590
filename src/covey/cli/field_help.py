"""The help on the fields of a recipe."""

from __future__ import annotations

import sys

from covey.config import ControlConfig, RunConfig
from covey.config.recipe import FieldHelp, describe_fields
from covey.config.sft import SFT_TABLE
from covey.config.terminal import fitted, width_of


def fields_help(*, advanced: bool) -> str:
    """The fields of both kinds of recipe with type, default and meaning, for `--help`.

    Args:
        advanced: include the fields that few runs set.
    """
    language = _fields_of(RunConfig, "fields of a recipe for language models (one with a table [task])", advanced)
    control = _fields_of(ControlConfig, "fields of a recipe for control (one with a table [environment])", advanced)
    how = "Every field can be given as --field value (lists with commas)."
    if not advanced:
        how += " --help-all shows the other fields."
    return "\n".join([how, "", *language, "", "", *control])


def field_options(root: type) -> list[tuple[str, FieldHelp]]:
    """Every field of a kind of recipe with the option that sets it; fields of [[rewards]] have none."""
    rows = describe_fields(root)
    plain = [row for row in rows if not row.section.startswith(("task", "rewards"))]
    others = [row for row in plain if row.section != SFT_TABLE]
    shared = {row.name for row in others if sum(other.name == row.name for other in others) > 1}
    ambiguous = shared | {row.name for row in others if not row.section}
    dotted = [row.section == SFT_TABLE or row.name in ambiguous for row in rows]
    return [(_option(row, dotted=bool(row.section) and long), row) for row, long in zip(rows, dotted, strict=True)]


def _fields_of(root: type, title: str, advanced: bool) -> list[str]:
    lines, section = [f"==== {title} ===="], None
    for option, row in field_options(root):
        if row.advanced and not advanced:
            continue
        if row.section != section:
            section = row.section
            where = {"": "top level", "rewards": "[[rewards]], in the recipe file only"}
            lines += ["", where.get(section, f"[{section}]")]
        lines.append(field_line(option, row))
    return lines


def _option(row: FieldHelp, *, dotted: bool) -> str:
    if row.section == "rewards":
        return row.name
    name = row.name.replace("_", "-")
    return f"--{row.section.split()[0]}.{name}" if dotted else f"--{name}"


def field_line(option: str, row: FieldHelp) -> str:
    """The line of a field: its option, its meaning, type and default."""
    default = f" [{row.default}]" if row.default not in ("", '""', "[]") else ""
    return fitted(f"  {option:<28} {row.text} ({row.type}){default}", width_of(sys.stdout), " " * 29)
