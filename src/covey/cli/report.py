"""The command `covey report`."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from covey.cli.runs import named_run
from covey.config import ConfigError
from covey.config.fields import command
from covey.config.files import path_error, user_path
from covey.config.recipe import config_from_dict, read_tables
from covey.config.terminal import say
from covey.tracking.run_reader import RunReader
from covey.tracking.run_store import CONFIG_FILE

SEVERAL = "report"  # name of the report of several runs, without its suffix
EPILOG = """\
The file is the page of covey watch without a server: the result with 95 % intervals, what to do next, the diagnosis,
curves, the held-out answers that changed most, groups of rollouts with rewards and advantages, settings, versions, and
the command to repeat the run. Several runs are laid over each other. The file loads nothing, so it can be sent to
others. A run may still be running."""


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """The options of `covey report`."""
    parser.usage = "covey report RUN [RUN ...] [-o FILE.html] [--title TEXT]"
    parser.epilog = EPILOG
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    name = f"the HTML file; a report that is there is replaced (RUN.html; of several runs {SEVERAL}.html)"
    parser.add_argument("-o", "--output", metavar="FILE", help=name)
    parser.add_argument("--title", default="", metavar="TEXT", help="title of the page (the names of the runs)")


def report_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey report`."""
    folders = list(dict.fromkeys(named_run(name) for name in arguments.runs))
    from covey.watch.report import MOST_RUNS, is_report, write_report

    if len(folders) > MOST_RUNS:
        raise ConfigError(f"a report compares at most {MOST_RUNS} runs (are {len(folders)}): name fewer")
    name = folders[0].resolve().name if len(folders) == 1 else SEVERAL
    file = user_path(arguments.output, "--output: ") if arguments.output else Path(f"{name}.html")
    try:
        if file.is_dir() or (file.exists() and not is_report(file)):
            raise ConfigError(f"--output {file}: it is there already and no report of covey, so it is not replaced")
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"--output {file}: there is no folder {file.parent}, create it or name another")
    except OSError as error:
        raise path_error(error, f"--output {file} cannot be used", file) from error
    write_report(folders, file, arguments.title, advice_on)
    say(f"{file} has the report ({file.stat().st_size / 1e6:.1f} MB): open it in a browser")


def advice_on(run_dir: Path) -> dict[str, str]:
    """What the page says of a run beside its records: how to "repeat" it and, of a finished one, what to do "next".

    A text that the folder does not tell is absent.
    """
    from covey.experiment.advice import Finished, after_training, read_launch, start

    launch = read_launch(run_dir)
    try:
        config = config_from_dict(read_tables(run_dir / CONFIG_FILE))
    except ConfigError:
        return {}
    if launch is None:
        return {"repeat": command("train", run_dir / CONFIG_FILE, "--run-dir", "")}
    advice = {"repeat": start(launch, config, {})}
    with suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):  # no summary, or one of another version
        summary = RunReader(run_dir).summary() or {}
        text = after_training(Finished(launch, config, str(run_dir), drawable=False), summary)
        advice["next"] = text.partition("Next: ")[2]
    return advice
