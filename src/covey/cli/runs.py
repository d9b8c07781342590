"""The command `covey runs` and its actions `prune` and `export`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from covey.cli.options import Command, Parser, number, option
from covey.config import ConfigError
from covey.config.fields import command, plural
from covey.config.files import user_path
from covey.config.terminal import say
from covey.tracking.output import plain_console

ROOT = "runs"
STATES = ("running", "finished", "stopped", "crashed")
SORTED_BY = ("changed", "began", "name", "state", "step", "score", "change", "size")
WIDE = 400  # columns of the table where the output is not a terminal
EPILOG = """\
A run is running while a process writes to it; finished; stopped (by Ctrl-C, or early) or crashed (killed, or ended by
an error): both go on with covey train --resume RUN. The result is the held-out score before -> after training, with its
95 % interval; before the end of a run it is the last evaluation so far. Sizes are those of all files of a run."""
PRUNE_EPILOG = """\
The newest complete checkpoint of a run stays, for --resume and RUN, and its best ones, for RUN@best. Runs that are not
finished keep everything. Without --yes nothing is removed. model/, the records and the pictures always stay."""
EXPORT_EPILOG = """\
A row is a rollout (with --held-out: an answer to a held-out problem), a column a key of its record. Data columns are
columns.NAME, parts of the reward reward_parts.NAME; mixed or nested values are JSON text. The suffix of FILE is the
format: .parquet (needs pyarrow: pip install "covey[arrow]"), .jsonl or .csv."""


def _list_options(parser: Parser) -> None:
    parser.usage = (
        "covey runs [FOLDER] [options]\n"
        "       covey runs prune [RUN ...] [--keep N] [--yes]\n"
        "       covey runs export RUN FILE [--held-out]"
    )
    parser.epilog = EPILOG
    option(parser, "[FOLDER]", "the folder to search", default=ROOT)
    option(parser, "--state STATES", f"only runs in these states, with commas: {', '.join(STATES)}")
    option(parser, "--name TEXT", "only runs with this text in their path")
    option(parser, "--algorithm ALGORITHM", "only runs of this algorithm")
    option(parser, "--seed SEED", "only runs with this seed", int)
    option(parser, "--sort KEY", f"{', '.join(SORTED_BY)}", default="changed", choices=SORTED_BY)
    option(parser, "--reverse", "reverse the order, in which the newest or best is first")
    option(parser, "--json", "one JSON list, for other programs")


def _prune_options(parser: Parser) -> None:
    parser.usage = "covey runs prune [RUN ...] [--keep N] [--yes]"
    parser.epilog = PRUNE_EPILOG
    option(parser, "[RUN...]", f"runs, or folders of runs ({ROOT})")
    option(parser, "--keep N", "newest checkpoints kept", number(int, 1, 1000), 1)
    option(parser, "--yes", "remove; without it, only list what would be removed")


def _export_options(parser: Parser) -> None:
    parser.usage = "covey runs export RUN FILE [--held-out]"
    parser.epilog = EXPORT_EPILOG
    option(parser, "RUN", "a run folder; it may still be running")
    option(parser, "FILE", "a new file")
    option(parser, "--held-out", "the held-out answers instead of the rollouts")


def list_action(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey runs [FOLDER]`."""
    states = _states(arguments.state)
    folders = find_named_runs([arguments.folder])
    from covey.tracking.run_overview import SORT_KEYS, overview, overview_table

    runs = [
        run
        for run in map(overview, folders)
        if (not states or run.state in states)
        and (arguments.name or "") in str(run.path)
        and arguments.algorithm in (None, run.algorithm)
        and arguments.seed in (None, run.seed)
    ]
    runs.sort(key=SORT_KEYS[arguments.sort], reverse=arguments.reverse)
    if arguments.json:
        print(json.dumps([run.as_dict() for run in runs], indent=2))
        return
    if not runs:
        say(f"none of the {plural(len(folders), 'run')} is like that")
        return
    width = None if sys.stdout.isatty() else WIDE
    plain_console(width=width).print(overview_table(runs))


def prune_action(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey runs prune`."""
    folders = find_named_runs(arguments.runs or [ROOT])
    from covey.tracking.run_overview import plan_pruning, prune, size_text

    plans = [plan for plan in (plan_pruning(folder, arguments.keep) for folder in folders) if plan is not None]
    freed = 0
    for plan in plans:
        kept = f"; {', '.join(plan.kept)} stay{'s' if len(plan.kept) == 1 else ''}"
        if arguments.yes:
            try:
                prune(plan)
            except ConfigError as error:  # it was resumed in the meantime
                say(f"{plan.run_dir} is left as it is: {error}")
                continue
        freed += plan.bytes
        done = "removed" if arguments.yes else "would remove"
        say(f"{plan.run_dir}: {done} {', '.join(plan.removed)} ({size_text(plan.bytes)}){kept}")
    if not plans:
        say(f"nothing to remove: no finished run among {plural(len(folders), 'run')} has old checkpoints")
    elif arguments.yes:
        say(f"{size_text(freed)} freed")
    else:
        again = command("runs", "prune", *arguments.runs, *(["--keep", arguments.keep] if arguments.keep > 1 else []))
        say(f"{size_text(freed)} would be freed; nothing is removed yet. Next: {again} --yes")


def export_action(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey runs export`."""
    run, file = named_run(arguments.run), user_path(arguments.file)
    from covey.tracking.rollout_export import check_export, export_records
    from covey.tracking.run_folder import check_new_file

    check_export(file)
    check_new_file(file, "FILE")
    exported = export_records(run, file, held_out=arguments.held_out)
    what = "answer" if arguments.held_out else "rollout"
    say(f"{file} has {plural(exported.rows, what)} of {plural(exported.steps, 'step')}, in {exported.columns} columns")
    if exported.damaged:
        say(f"{plural(exported.damaged, 'line')} of the records {_is_are(exported.damaged)} damaged and left out")


def named_run(name: str) -> Path:
    """The run folder that the user named.

    Raises:
        ConfigError: if it holds no run; the message names those that it contains.
    """
    from covey.tracking.run_folder import find_runs, is_run

    folder = user_path(name, "RUN: ")
    if is_run(folder):
        return folder
    if not folder.is_dir():
        raise ConfigError(f"there is no run folder {name}: {command('runs')} lists the runs below {ROOT}/")
    inside = find_runs(folder)
    hint = f"name one of its runs, such as {inside[-1]}" if inside else f"{command('runs')} lists the runs"
    raise ConfigError(f"{name} is not a covey run folder: {hint}")


def find_named_runs(names: Sequence[str]) -> list[Path]:
    """The runs below the folders that the user named.

    Raises:
        ConfigError: if one does not exist or has none.
    """
    from covey.tracking.run_folder import find_runs

    found: dict[Path, None] = {}
    for name in names:
        folder = user_path(name)
        runs = find_runs(folder)
        if not runs:
            missing = "there is no folder" if not folder.is_dir() else "there is no run below"
            raise ConfigError(f"{missing} {name}: train one with {command('train', 'cartpole_grpo')}, or name another "
                              "folder")  # fmt: skip
        found |= dict.fromkeys(runs)
    return list(found)


def _states(given: str | None) -> set[str]:
    states = set(given.split(",")) if given else set()
    for state in sorted(states - set(STATES)):
        from covey.config.fields import did_you_mean, or_list

        raise ConfigError(f"--state must be {or_list(STATES)} (is {state!r}){did_you_mean(state, list(STATES))}")
    return states


def _is_are(count: int) -> str:
    return "is" if count == 1 else "are"


COMMAND = Command("runs", "list runs, remove old checkpoints, export rollouts", lambda parser: None, lambda *_: None,
                  default_action="list", actions=(
    Command("list", "list runs with their state, result, size and age", _list_options, list_action),
    Command("prune", "remove old checkpoints of finished runs", _prune_options, prune_action),
    Command("export", "write the rollouts of a run as one table: Parquet, JSONL or CSV", _export_options,
            export_action),
))  # fmt: skip
