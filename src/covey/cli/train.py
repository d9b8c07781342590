"""The commands `covey train`, `iterate`, `check`, `compare` and `recipes`."""

import argparse
import shutil
import sys
from pathlib import Path

from covey.cli.options import RECIPE, Command, Parser, add_fields_help, number, option
from covey.config import ConfigError, ControlConfig, DatasetConfig, RunConfig
from covey.config.fields import command, printable
from covey.config.files import user_path
from covey.config.recipe import (
    changes_to_toml,
    describe_recipe,
    find_recipe,
    packaged_recipes,
    read_recipe,
    read_tables,
    root_of,
    split_overrides,
    training_command,
)
from covey.config.terminal import fitted, say
from covey.runtime.interrupts import EXIT_CODE, patient
from covey.runtime.variables import check_ranks, own_rank
from covey.tracking.run_folder import check_run_dir, next_run_dir

EXAMPLES = {"train": "arithmetic_grpo", "iterate": "my.toml"}  # recipes


def _run_options(parser: Parser) -> None:
    parser.usage = f"{parser.prog} RECIPE [--field value ...]\n       {parser.prog} --resume RUN_DIR [--steps N]"
    add_fields_help(parser)
    option(parser, "[RECIPE]", RECIPE)
    option(parser, "--resume RUN_DIR", "continue a stopped run from its last checkpoint; a finished one with --steps N")


def train_command(arguments: argparse.Namespace, fields: list[str]) -> int | None:
    """`covey train` and `covey iterate`; returns the exit code of a stopped run, which has printed how to continue."""
    if arguments.resume:
        run_dir, limits = resumed_run(arguments.resume, arguments.recipe), dict(split_overrides(fields))
        from covey.experiment.run import resume

        return EXIT_CODE if resume(run_dir, limits=limits) is None else None
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
    return EXIT_CODE if run(config, recipe_name=arguments.recipe, launch=launch) is None else None


def resumed_run(folder: str, source: str | None) -> Path:
    """The folder of the run that --resume names.

    Raises:
        ConfigError: if a recipe or data are named too, or there is no run that can be resumed.
    """
    if source:
        raise ConfigError(f"a resumed run keeps the settings that it began with: leave out {source}")
    run_dir = user_path(folder, "--resume: ")
    if not own_rank():
        check_run_dir(run_dir, resume=True)
    return run_dir


def check_data(config: RunConfig | ControlConfig) -> None:
    """Read the data of a run, so that a mistake in it is reported before torch is loaded.

    Raises:
        ConfigError: naming file and line.
    """
    if isinstance(config, RunConfig) and isinstance(config.task, DatasetConfig):
        from covey.llm.data.rows import read_data

        read_data(config.task)


def _check_options(parser: Parser) -> None:
    parser.usage = "covey check RECIPE [--field value ...]"
    add_fields_help(parser)
    option(parser, "RECIPE", RECIPE)


def check_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey check`."""
    config = read_recipe(arguments.recipe, fields)
    check_run_dir(config.run_dir or next_run_dir(find_recipe(arguments.recipe).stem))
    from covey.config.inputs import named_code

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


def _compare_options(parser: Parser) -> None:
    parser.usage = "covey compare RECIPE [RECIPE ...] [options] [--field value ...]"
    parser.epilog = (
        "--field value changes a field of every recipe; `covey train --help` lists them. A quoted recipe can have\n"
        "fields of its own: covey compare cartpole_grpo 'cartpole_grpo --group-size 16'. The same command continues\n"
        "an interrupted comparison with its missing runs."
    )
    option(parser, "RECIPE...", "TOML files, or names of packaged recipes")
    option(parser, "--seeds N", "runs of every recipe, each from its own seed", number(int, 1, 10_000), 10)
    option(parser, "--output DIR", "folder of the runs, the figures and the report")
    option(parser, "--jobs N", "runs at the same time; 0: one per core (0)", number(int, 0, 1000), 0)
    goal = "return to reach (the recipes' expected_return)"
    option(parser, "--threshold NUMBER", goal, number(float, -1e30, 1e30))


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


def _recipes_options(parser: Parser) -> None:
    parser.usage = "covey recipes [RECIPE]"
    parser.epilog = "A recipe of your own can begin as a copy: covey recipes arithmetic_grpo > my.toml"
    option(parser, "[RECIPE]", "print this one as it is, comments included")


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


TRAIN = Command("train", "train a language model, or an agent in an environment", _run_options, train_command,
                takes_fields=True, lasting=True)  # fmt: skip
ITERATE = Command("iterate", "train a policy and its reward model in turn (iterative GRPO)", _run_options,
                  train_command, takes_fields=True, lasting=True)  # fmt: skip
CHECK = Command("check", "check a recipe without training", _check_options, check_command, takes_fields=True)
COMPARE = Command("compare", "train several recipes over several seeds and report the differences", _compare_options,
                  compare_command, takes_fields=True, lasting=True)  # fmt: skip
RECIPES = Command("recipes", "list the packaged recipes, or print one", _recipes_options, recipes_command)
