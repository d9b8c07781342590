"""Building blocks of the commands: parsers, options, options of the fields of a config, and the help on a recipe."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields
from functools import partial
from typing import Any, NoReturn

from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.fields import TYPE_NAMES, check_value, describe_type, get_type_hints
from covey.config.files import shortened
from covey.config.recipe import FieldHelp, describe_fields, parse_value
from covey.config.sft import SFT_TABLE
from covey.config.terminal import fitted, width_of

MOST_TOKENS = 1_000_000  # limit of an answer or a prompt
COLDEST, HOTTEST = 1e-4, 1e4  # limits of a temperature above 0
MODEL = "a model's name, folder or .gguf file, or a run folder"
RECIPE = "a TOML file, or the name of a packaged recipe"


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are ConfigErrors: one line, exit code 2."""

    def format_help(self) -> str:
        if callable(self.epilog):
            self.epilog = self.epilog()
        self.epilog = self.epilog and fitted(self.epilog, width_of(sys.stdout))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Command:
    """A command of `covey`, or an action of one."""

    name: str
    summary: str
    add_options: Callable[[Parser], None]
    run: Callable[[argparse.Namespace, list[str]], int | None]  # gets also the `--field value` words of a config
    takes_fields: bool = False  # --field value for fields of a recipe
    lasting: bool = False  # goes on if nobody reads its output
    actions: tuple[Command, ...] = ()
    default_action: str = ""  # if it can be left out


def option(parser: Any, words: str, text: str, kind: Any = str, default: Any = None, **settings: Any) -> None:
    """Add an option or a positional.

    Args:
        parser: a parser, or a group of options.
        words: `--name` is a flag, `--name VALUE` has a value, `--name a|b` one of these; `NAME` is a positional,
            `[NAME]` one that can be left out; with `...` there may be several.
        text: its help, to which the default is added.
        kind: the argparse type of the value.
        default: its value if it is not given.
        settings: further arguments of `add_argument`.
    """
    name, _, metavar = words.partition(" ")
    text += f" ({default})" if default else ""
    if not name.startswith("-"):
        many, optional = "..." in name, name.startswith("[")
        nargs = {(True, True): "*", (True, False): "+", (False, True): "?"}.get((many, optional))
        metavar = name.strip("[].")
        settings |= {"nargs": nargs} if nargs else {}
        parser.add_argument(
            f"{metavar.lower()}{'s' * many}", metavar=metavar, type=kind, default=default, help=text, **settings
        )
    elif not metavar:
        parser.add_argument(name, action="store_true", help=text, **settings)
    else:
        settings |= {"choices": tuple(metavar.split("|"))} if "|" in metavar else {"metavar": metavar}
        parser.add_argument(*name.split(","), type=kind, default=default, help=text, **settings)


def number(kind: type, least: float, most: float) -> Callable[[str], Any]:
    """argparse type of a number: an int or a float from `least` to `most`."""

    def parse_number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {TYPE_NAMES[kind]} (is {shortened(text)})") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a finite number (is {value})")
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:.12g} (is {value})")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:.12g} (is {value})")
        return value

    return parse_number


def temperature(text: str) -> float:
    """argparse type of --temperature: 0 for greedy answers, or a valid [sampling] temperature."""
    value: float = number(float, 0, HOTTEST)(text)
    if 0 < value < COLDEST:
        raise argparse.ArgumentTypeError(f"must be 0 or at least {COLDEST:g} (is {value})")
    return value


def option_of(name: str) -> str:
    """The option of an argument or a field: `--max-tokens` of max_tokens."""
    return f"--{name.replace('_', '-')}"


def add_fields(
    parser: Any, root: type, *, flags: bool = True, only: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> None:
    """Add an option for each field of a config, with its help; `given_fields` reads them.

    Args:
        flags: a field that is true or false is an option without a value.
        only: these fields; empty: all.
        without: not these.
    """
    for item, hint in _fields(root):
        if item.name in without or (only and item.name not in only):
            continue
        text = item.metadata["help"].replace("%", "%%")
        if flags and hint is bool:
            parser.add_argument(option_of(item.name), action="store_const", const="true", help=text)
            continue
        kind = " | ".join(item.metadata["choices"]) or describe_type(hint)
        default = f" [{item.default!r}]" if item.default or item.default == 0 else ""
        parser.add_argument(option_of(item.name), metavar="VALUE", help=f"{text} ({kind}){default}")


def given_fields(arguments: argparse.Namespace, root: type) -> dict[str, Any]:
    """The fields of a config whose options were given.

    Raises:
        ConfigError: for a value that is not of the field's type, one of its choices and within its limits.
    """
    found = {}
    for item, hint in _fields(root):
        text = getattr(arguments, item.name, None)
        if text is not None:
            value = parse_value(text, hint, option_of(item.name))
            found[item.name] = tuple(value) if isinstance(value, list) else value
            check_value(option_of(item.name), item, hint, found[item.name])
    return found


def _fields(root: Any) -> Iterator[tuple[Field[Any], Any]]:
    hints = get_type_hints(root)
    for item in fields(root):
        if "help" in item.metadata:
            yield item, hints[item.name]


class _HelpAll(argparse.Action):
    """`--help-all`: the help of a command with every field of a recipe."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.epilog = fields_help(advanced=True)
        parser.print_help()
        parser.exit()


def add_fields_help(parser: Parser) -> None:
    """Add the help on the fields of a recipe."""
    parser.epilog = partial(fields_help, advanced=False)  # type: ignore[assignment]  # which takes time
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every field of a recipe and exit")


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
