"""The command `covey watch`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from covey.cli.numbers import number
from covey.cli.report import advice_on


def add_watch_options(command: Any) -> None:
    """Add the options of `covey watch`."""
    command.usage = "covey watch [RUN ...] [--port PORT] [--open]"
    command.epilog = (
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
    command.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run folder, a folder with runs below it, or a name below runs/ (all runs below runs/)",
    )
    command.add_argument(
        "--port", type=number(int, 0, 65535), help="port on 127.0.0.1; 0: any free one (8808, or the next free one)"
    )
    command.add_argument("--open", action="store_true", help="open the page in the browser")


def watch_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey watch`."""
    from covey.watch.command import watch

    try:
        watch(arguments.runs, port=arguments.port, open_page=arguments.open, advise=advice_on)
    except KeyboardInterrupt:  # the usual end
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the ^C that the terminal shows
