"""The command line of `covey`: its commands, their parsers, errors and exit codes.

Each command parses its arguments, calls one function and prints the result. Heavy modules are imported inside the
commands, so that a mistake is reported before torch is loaded.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from covey.cli import completion, evaluate, export, plan, report, reward_model, runs, sample, serve, sft, show, train
from covey.cli.options import Command, Parser
from covey.config import ConfigError, ControlConfig, RunConfig, RunError
from covey.config.fields import TRAININGS, command, did_you_mean, or_list, printable
from covey.config.files import machine_error, path_error, shortened
from covey.config.recipe import describe_fields, packaged_recipes, split_overrides
from covey.config.terminal import say
from covey.runtime.interrupts import EXIT_CODE, leave, say_last_words, watched
from covey.runtime.variables import is_echo, own_rank, world_size
from covey.tracking.output import expect_early_end, outlasting_output

COMMANDS = {
    one.name: one
    for one in (
        train.TRAIN, train.ITERATE, sft.COMMAND, train.CHECK, plan.COMMAND, evaluate.COMMAND, train.COMPARE,
        report.DIAGNOSE, sample.COMMAND, export.COMMAND, report.WATCH, serve.COMMAND, reward_model.COMMAND,
        runs.COMMAND, show.COMMAND, report.REPORT, train.RECIPES, completion.COMMAND,
    )
}  # fmt: skip
LONGEST_MESSAGE, TAIL = 1500, 300  # characters of an error
WIDTHS = (20, 1000)  # valid columns of a terminal; COLUMNS is ignored outside this range
FAILED, MISTAKE, MACHINE, INTERRUPTED = 1, 2, 3, EXIT_CODE  # exit codes

OVERVIEW = """\
covey trains a language model or an agent by reinforcement: attempts are
compared with each other (GRPO) or with a critic (PPO).

see it work:
  covey train cartpole_grpo      an agent balances a pole, in seconds
  covey train arithmetic_grpo    a language model learns to add, in minutes
  covey recipes                  all packaged recipes, one line each

train on prompts and rewards of your own:
  covey recipes arithmetic_grpo > my.toml     a recipe to change
  covey check my.toml                         find mistakes, predict memory
  covey train my.toml                         writes to runs/my-001
  covey watch                                 see your runs in the browser
  covey eval runs/my-001                      score on held-out problems
  covey sample runs/my-001 "What is 3 + 4?"   answers to one prompt

look at runs:
  covey runs                     state, result and size of each
  covey show runs/my-001         rollouts with their rewards
  covey report runs/my-001       one HTML file with everything

covey --help lists the commands, covey train --help the fields of a recipe."""

EPILOG = """\
first steps:
  covey train cartpole_grpo, then covey train arithmetic_grpo;
  covey without a command shows more examples

completion with Tab:
  eval "$(covey completion bash)", also for zsh and fish

exit codes:
  0    success
  1    the run cannot continue
  2    a mistake in the command, the recipe or the data
  3    a fault of the machine: disk, memory or permission
  130  stopped by Ctrl-C"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    mask = os.umask(0o022)
    if mask & 0o002:  # without it everybody may write what is created, also caches and settings of other libraries
        os.umask(mask)
    set_up_output(silent=own_rank() > 0)  # the other ranks print errors alone
    with outlasting_output(), watched(lambda: f"interrupted. Start again with: {command(*words)}"):
        return _execute([word for word in words if word != "--debug"], debug)


def _execute(words: list[str], debug: bool) -> int:
    try:
        check_surroundings()
        if not words:
            print(OVERVIEW)
            return 0
        arguments, fields = parse(words)
        called = tuple(dict.fromkeys((arguments.command, arguments.action)))
        if world_size() > 1 and called not in TRAININGS:
            trainings = or_list([" ".join(("covey", *words)) for words in TRAININGS])
            raise ConfigError(f"torchrun is for {trainings}: start {command(*called)} without it")
        if not COMMANDS[arguments.command].lasting:
            expect_early_end()
        return arguments.chosen.run(arguments, fields) or 0
    except KeyboardInterrupt:
        say_last_words()
        return INTERRUPTED
    except (ConfigError, RunError) as error:
        if debug:
            raise
        _say_error(one_line(error))
        return MISTAKE if isinstance(error, ConfigError) else FAILED
    except Exception as error:
        if debug:
            raise
        if fault := machine_error(error):
            _say_error(one_line(fault))
            return MACHINE
        _say_error(f"unexpected {type(error).__name__}: {one_line(error)} (--debug shows where)")
        return FAILED


def _say_error(text: str) -> None:
    if not is_echo():
        say(f"error: rank {own_rank()}: {text}" if world_size() > 1 else f"error: {text}", sys.stderr)


def one_line(error: Exception) -> str:
    """An error's message without line breaks and control characters; the middle of a very long one is left out."""
    text = printable(" ".join(str(error).split()))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - TAIL]} ... {text[-TAIL:]}"


def check_surroundings() -> None:
    """Check that the working directory exists, and ignore an unusable $COLUMNS.

    Raises:
        ConfigError: if the working directory no longer exists.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise path_error(error, "the working directory cannot be used, change to another one") from error
    columns = os.environ.get("COLUMNS", "")
    if columns and not (columns.isdecimal() and WIDTHS[0] <= int(columns[:9]) <= WIDTHS[1]):
        del os.environ["COLUMNS"]


class _PrintableRecord(logging.LogRecord):
    """A log record of any library without control characters, because it may quote a file."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def set_up_output(*, silent: bool) -> None:
    """Set up output and logs of this process; with `silent` it prints errors alone."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may write characters that the terminal cannot encode
    logging.setLogRecordFactory(_PrintableRecord)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("covey").setLevel(logging.ERROR if silent else logging.INFO)
    if silent:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own arguments; returns them and the `--field value` words of the config.

    Raises:
        ConfigError: for arguments that the command does not have.
    """
    parser, commands = build_parser(words[:1])
    if not words or words[0] in parser._option_string_actions:
        parser.parse_args(words[:1])  # --help or --version ends here
        parser.error("name a command")
    if words[0] not in commands:
        parser.error(_no_command(words[0], [name for name in commands if " " not in name], parser))
    leaf = " ".join(words[:2]) if " ".join(words[:2]) in commands else words[0]
    rest = words[len(leaf.split()) :]
    if leaf in COMMANDS and COMMANDS[leaf].default_action:
        leaf = f"{leaf} {COMMANDS[leaf].default_action}"
    own, fields = _split(rest, commands[leaf])
    arguments, extra = parser.parse_known_args([*leaf.split(), *own])
    if extra:
        commands[leaf].error(_extra_word(extra[0], rest, commands[leaf]))
    _check_fields(fields, commands[leaf], arguments.chosen.takes_fields)
    return arguments, fields


def _no_command(word: str, commands: list[str], parser: Parser) -> str:
    if word.startswith("-"):
        return f"unknown option {shortened(word)}{did_you_mean(word, list(parser._option_string_actions))}"
    near = did_you_mean(word, commands)
    if not near and (word in packaged_recipes() or word.endswith(".toml")):
        return f"{word} is a recipe, not a command: write {command('train', word)}"
    return f"there is no command {shortened(word) or repr(word)}{near}; commands: {', '.join(commands)}"


def _extra_word(word: str, words: Sequence[str], parser: Parser) -> str:
    """The error for a word that no option or positional takes, such as the second of `--targets q_proj, v_proj`."""
    told = f"extra word {shortened(word)}"
    place = words.index(word) if word in words else 0
    option = words[place - 2] if place >= 2 else ""
    action = parser._option_string_actions.get(option)
    if not option.startswith("--") or option == "--" or "=" in option or (action and action.nargs == 0):
        return told
    values = takewhile(lambda one: not one.startswith("--"), words[place - 1 :])
    written = ",".join(value.strip(",") for value in values)
    return f"{told}: an option has one value, so write a list as {option} {written}, and a text with spaces in quotes"


def _check_fields(fields: list[str], parser: Parser, takes_fields: bool) -> None:
    """Refuse a misspelt option of the command itself, before it is interpreted as a field of a recipe."""
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    if fields and not takes_fields:
        option = f"--{fields[0].lstrip('-').partition('=')[0].replace('_', '-')}"
        parser.error(f"unknown option {shortened(option)}{did_you_mean(option, options)}")
    for name, _ in split_overrides(fields) if takes_fields else []:
        option = f"--{name.replace('_', '-')}"
        near = did_you_mean(option, options, likeness=0.8)
        if near and name.replace("-", "_") not in _field_names():
            parser.error(f"unknown option {shortened(option)}{near}")


def _field_names() -> set[str]:
    return {row.name for root in (RunConfig, ControlConfig) for row in describe_fields(root)}


def _split(words: Sequence[str], command: Parser) -> tuple[list[str], list[str]]:
    """Separate a command's own options and positionals from `--field value` and `--field=value`.

    argparse alone would interpret a value that begins with a minus, as in `--operators -,+`, as an option. Options come
    first, because argparse takes an optional positional for missing if an option stands before it.
    """
    options: list[str] = []
    own: list[str] = []
    fields: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*options, *own, word, *words], fields
        name, equals, value = word.partition("=")
        option = command._option_string_actions.get(name.replace("_", "-"))
        following = []
        takes_value = word.startswith("--") if option is None else option.nargs != 0
        if takes_value and not equals and words:
            following = [words.pop(0)]
        if option:
            options.append("=".join([name.replace("_", "-"), *([value] if equals else following)]))
        else:
            (fields if word.startswith("--") else own).extend([word, *following])
    return [*options, *own], fields


class _Version(argparse.Action):
    """`--version`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version  # here, because it loads much

        print(f"covey {version('covey')}")
        parser.exit()


def build_parser(chosen: Sequence[str] = tuple(COMMANDS)) -> tuple[Parser, dict[str, Parser]]:
    """Build the parser of the command line; returns it and the parser of each command by name.

    Args:
        chosen: the commands whose options are added, because their help takes time.
    """
    parser = Parser(
        prog="covey",
        description="Train a language model or an agent by comparing attempts with each other.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show covey's version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parsers: dict[str, Parser] = {}
    _add_commands(parser, list(COMMANDS.values()), chosen, parsers)
    return parser, parsers


def _add_commands(
    parser: Parser, commands: Sequence[Command], chosen: Sequence[str], parsers: dict[str, Parser], owner: str = ""
) -> None:
    """Add the parsers of commands, or of the actions of the command `owner`."""
    kind = "action" if owner else "command"
    added = parser.add_subparsers(title=f"{kind}s", metavar=kind.upper(), required=bool(owner))
    for one in commands:
        made = added.add_parser(
            one.name, help=one.summary, description=one.summary, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        parsers[f"{owner} {one.name}".strip()] = made
        made.set_defaults(command=owner or one.name, action=one.name, chosen=one)
        if (owner or one.name) not in chosen:
            continue
        one.add_options(made)
        if one.actions:
            _add_commands(made, one.actions, chosen, parsers, one.name)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")


if __name__ == "__main__":
    leave(main())
