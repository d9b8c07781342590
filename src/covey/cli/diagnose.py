"""The command `covey diagnose`."""

from __future__ import annotations

import argparse

from covey.config.files import user_path
from covey.config.terminal import say


def add_diagnose_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `covey diagnose`."""
    command.usage = "covey diagnose RUN [RUN ...]"
    command.epilog = "docs/healthy.md explains the checks and their thresholds."
    command.add_argument("run_dirs", nargs="+", metavar="RUN", help="folder of a run, which may still be going on")


def diagnose_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey diagnose`."""
    from covey.tracking.diagnosis import write_findings

    for number, name in enumerate(arguments.run_dirs):
        run_dir = user_path(name)
        if number:
            say("")
        say(write_findings(run_dir))
