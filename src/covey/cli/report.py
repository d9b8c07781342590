"""The commands `covey report`, `covey diagnose` and `covey watch`."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from covey.cli.options import Command, Parser, number, option
from covey.cli.runs import named_run
from covey.config import ConfigError
from covey.config.fields import command
from covey.config.files import path_error, user_path
from covey.config.model_sources import CONFIG_FILE
from covey.config.recipe import config_from_dict, read_tables
from covey.config.terminal import say

SEVERAL = "report"  # name of the report of several runs, without its suffix
EPILOG = """\
The file is the page of covey watch without a server: the result with 95 % intervals, what to do next, the diagnosis,
curves, the held-out answers that changed most, groups of rollouts with rewards and advantages, settings, versions, and
the command to repeat the run. Several runs are laid over each other. The file loads nothing, so it can be sent to
others. A run may still be running."""


def _report_options(parser: Parser) -> None:
    parser.usage = "covey report RUN [RUN ...] [-o FILE.html] [--title TEXT]"
    parser.epilog = EPILOG
    option(parser, "RUN...", "run folders")
    name = f"the HTML file; a report that is there is replaced (RUN.html; of several runs {SEVERAL}.html)"
    option(parser, "-o,--output FILE", name)
    option(parser, "--title TEXT", "title of the page (the names of the runs)", default="")


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
    from covey.tracking.run_reader import RunReader

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


def _diagnose_options(parser: Parser) -> None:
    parser.usage = "covey diagnose RUN [RUN ...]"
    parser.epilog = "docs/healthy.md explains the checks and their thresholds."
    option(parser, "RUN...", "folder of a run, which may still be going on")


def diagnose_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey diagnose`."""
    from covey.tracking.diagnosis import write_findings

    for place, name in enumerate(arguments.runs):
        run_dir = user_path(name)
        if place:
            say("")
        say(write_findings(run_dir))


def _watch_options(parser: Parser) -> None:
    parser.usage = "covey watch [RUN ...] [--port PORT] [--open]"
    parser.epilog = (
        "The page updates by itself while runs train. It has the curves, the rollouts of every step with their\n"
        "rewards, the held-out answers before and after, and the findings of the diagnosis. It changes nothing and\n"
        "needs no network.\n"
        "\n"
        "examples:\n"
        "  covey watch                          all runs below runs/, also those that begin later\n"
        "  covey watch runs/my-001 runs/my-002  two runs\n"
        "  covey watch runs/compare             the runs of a comparison\n"
        "\n"
        "Only this machine can open the page. To see runs of another machine, run covey watch there and, here,\n"
        "  ssh -N -L 8808:127.0.0.1:8808 THAT_MACHINE\n"
        "then open http://127.0.0.1:8808/ here."
    )
    option(
        parser, "[RUN...]", "a run folder, a folder with runs below it, or a name below runs/ (all runs below runs/)"
    )
    port = "port on 127.0.0.1; 0: any free one (8808, or the next free one)"
    option(parser, "--port PORT", port, number(int, 0, 65535))
    option(parser, "--open", "open the page in the browser")


def watch_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey watch`."""
    from covey.watch.command import watch

    try:
        watch(arguments.runs, port=arguments.port, open_page=arguments.open, advise=advice_on)
    except KeyboardInterrupt:  # the usual end
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the ^C that the terminal shows


REPORT = Command("report", "write a report of runs: one HTML file", _report_options, report_command)
DIAGNOSE = Command("diagnose", "find faults in runs, with evidence and remedies", _diagnose_options, diagnose_command)
WATCH = Command("watch", "show runs on a page in the browser, while they train and after", _watch_options,
                watch_command, lasting=True)  # fmt: skip
