"""Wraps lines to the terminal's width, between words, without breaking commands; other output is not wrapped."""

import re
import shutil
import sys
import textwrap
from typing import TextIO

from covey.config.fields import printable

# The command at the end of advice, to be copied unchanged.
_COMMAND = re.compile(r"(?<=: )(covey [a-z]|import covey;).*$")


def say(text: str, file: TextIO | None = None) -> None:
    """Print lines to standard output or `file`, wrapped to its terminal if it is one."""
    stream = sys.stdout if file is None else file
    stream.write(f"{fitted(text, width_of(stream))}\n")


def width_of(stream: TextIO) -> int | None:
    """Width in columns of a stream's terminal; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fitted(text: str, width: int | None, indent: str = "") -> str:
    """Wrap `text`, without control characters, to lines of `width`; a longer word or command has a line of its own.

    Args:
        width: in characters; None leaves the lines as they are.
        indent: added to the line's own indent in the second and later lines of a wrapped line.
    """
    text = printable(text)
    return text if width is None else "\n".join(_broken(line, width, indent) for line in text.split("\n"))


def _broken(line: str, width: int, indent: str) -> str:
    if len(line) <= width:
        return line
    found = _COMMAND.search(line)
    prose = line[: found.start()] if found else line
    inner = line[: len(line) - len(line.lstrip())] + indent
    parts = textwrap.wrap(
        prose.rstrip(), width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip
    return "\n".join([*parts, f"{inner}  {found[0]}"] if found else parts)
