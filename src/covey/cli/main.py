"""The command `covey`; `COMMANDS` lists its commands.

Each command parses its arguments, calls one function and prints the result. Heavy modules are imported inside the
commands, so that a mistake is reported before torch is loaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from covey.cli.diagnose import diagnose_command
from covey.cli.evaluate import check_data, eval_command
from covey.cli.export import export_command
from covey.cli.logs import set_up_output
from covey.cli.options import OVERVIEW, parse
from covey.cli.plan import plan_command
from covey.cli.report import report_command
from covey.cli.reward_model import reward_model_command
from covey.cli.runs import runs_command
from covey.cli.sample import sample_command
from covey.cli.serve import serve_command
from covey.cli.sft import sft_command
from covey.cli.show import show_command
from covey.cli.watch import watch_command
from covey.config import (
    ConfigError,
    ControlConfig,
    RunConfig,
    RunError,
)
from covey.config.fields import command, printable
from covey.config.files import machine_error, path_error, user_path
from covey.config.inputs import named_code
from covey.config.recipe import (
    changes_to_toml,
    describe_recipe,
    find_recipe,
    packaged_recipes,
    read_recipe,
    read_tables,
    root_of,
    training_command,
)
from covey.config.terminal import fitted, say
from covey.runtime.interrupts import EXIT_CODE, leave, patient, say_last_words, watched
from covey.runtime.variables import check_ranks, is_echo, own_rank, world_size
from covey.tracking.output import expect_early_end, outlasting_output
from covey.tracking.run_folder import check_run_dir, next_run_dir

LASTING = ("train", "iterate", "sft", "compare", "reward-model", "serve", "watch")  # go on if nobody reads their output
EXAMPLES = {"train": "arithmetic_grpo", "iterate": "my.toml"}  # recipes
LONGEST_MESSAGE, TAIL = 1500, 300  # characters of an error
WIDTHS = (20, 1000)  # valid columns of a terminal; COLUMNS is ignored outside this range
FAILED, MISTAKE, MACHINE, INTERRUPTED = 1, 2, 3, EXIT_CODE  # exit codes


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
        if world_size() > 1 and arguments.command != "train":
            raise ConfigError(f"torchrun is for covey train: start {command(arguments.command)} without it")
        if arguments.command not in LASTING:
            expect_early_end()
        return COMMANDS[arguments.command](arguments, fields) or 0
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


def train_command(arguments: argparse.Namespace, fields: list[str]) -> int | None:
    """`covey train` and `covey iterate`; returns the exit code of a stopped run, which has printed how to continue."""
    if arguments.resume and (arguments.recipe or fields):
        what = arguments.recipe or fields[0]
        raise ConfigError(f"a resumed run keeps the settings that it began with: leave out {what}")
    if arguments.resume:
        run_dir = user_path(arguments.resume)
        if not own_rank():
            check_run_dir(run_dir, resume=True)
        from covey.experiment.run import resume

        return INTERRUPTED if resume(run_dir) is None else None
    if not arguments.recipe:
        raise ConfigError(f"name a recipe, such as: {command(arguments.command, EXAMPLES[arguments.command])}")
    config = read_recipe(arguments.recipe, fields)
    if arguments.command == "iterate" and training_command(config) != "iterate":
        raise ConfigError(
            f"{arguments.recipe} is not an iterative run: set iteration.steps to the number of training steps "
            f"between two trainings of its reward model, or use {command('train', arguments.recipe)}"
        )
    if not own_rank():
        check_run_dir(config.run_dir or next_run_dir(find_recipe(arguments.recipe).stem))
    check_ranks(config)
    check_data(config)
    from covey.experiment.advice import Launch
    from covey.experiment.run import run

    launch = Launch.of_command(arguments.recipe, fields)
    return INTERRUPTED if run(config, recipe_name=arguments.recipe, launch=launch) is None else None


def check_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey check`."""
    config = read_recipe(arguments.recipe, fields)
    check_run_dir(config.run_dir or next_run_dir(find_recipe(arguments.recipe).stem))
    for line in named_code(config):
        say(printable(line))
    sys.stdout.flush()  # before that code prints
    check_data(config)
    from covey.experiment.run import check

    notes = check(config)
    print("# the other settings have their defaults: covey train --help-all lists them")
    print(changes_to_toml(config))
    if isinstance(config, RunConfig):
        from covey.experiment.plan import check_memory

        print(check_memory(config) + "\n")
    for note in notes:
        say(note)
    say(f"all is well. Next: {command(training_command(config), arguments.recipe, *fields)}")


def compare_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey compare`."""
    from covey.comparison.compare import compare

    with patient():  # after Ctrl-C its runs need time to save checkpoints
        compare(
            arguments.recipes,
            seeds=arguments.seeds,
            output=user_path(arguments.output, "--output: ") if arguments.output else None,
            jobs=arguments.jobs,
            threshold=arguments.threshold,
            overrides=fields,
        )


def recipes_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey recipes`."""
    if arguments.recipe:
        print(find_recipe(arguments.recipe).read_text(encoding="utf-8"), end="")
        return
    width = shutil.get_terminal_size().columns  # as for --help, also if the output is not a terminal
    for root, title in ((ControlConfig, "Agents in environments"), (RunConfig, "Language models")):
        names = [name for name in packaged_recipes() if root_of(read_tables(name)) is root]
        longest = max(map(len, names))
        print(f"{title}:")
        for name in names:
            print(fitted(f"  {name:<{longest}}  {describe_recipe(name)}", width, indent=" " * (longest + 2)))
        print()
    say(f"Next: {command('train', 'cartpole_grpo')}, or read one: {command('recipes', 'cartpole_grpo')}")


def completion_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey completion`."""
    from argcomplete import shellcode

    print(shellcode(["covey"], shell=arguments.shell))


COMMANDS = {
    "train": train_command,
    "iterate": train_command,
    "sft": sft_command,
    "check": check_command,
    "plan": plan_command,
    "eval": eval_command,
    "compare": compare_command,
    "diagnose": diagnose_command,
    "sample": sample_command,
    "export": export_command,
    "watch": watch_command,
    "serve": serve_command,
    "reward-model": reward_model_command,
    "runs": runs_command,
    "show": show_command,
    "report": report_command,
    "recipes": recipes_command,
    "completion": completion_command,
}


if __name__ == "__main__":
    leave(main())
