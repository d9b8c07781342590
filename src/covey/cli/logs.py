"""Output streams and logs of a command."""

from __future__ import annotations

import logging
import os
import sys

from covey.config.fields import printable


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
