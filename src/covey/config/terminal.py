"""Lines that fit a terminal: broken between words, with commands whole. Elsewhere every line stays as it is."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TextIO

# What advice ends with, to be copied as it stands.
_COMMAND = re.compile(r"(?<=: )(covey [a-z]|import covey;).*$")


def say(text: str, file: TextIO | None = None) -> None:
    """Print lines to standard output or `file`, fitted to the terminal that they go to."""
    stream = sys.stdout if file is None else file
    print(fitted(text, width_of(stream)), file=stream)


def width_of(stream: TextIO) -> int | None:
    """Columns of the terminal behind a stream; None if there is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fitted(text: str, width: int | None, indent: str = "") -> str:
    """`text` in lines of at most `width` characters; a word or a command that is longer has a line of its own.

    Args:
        width: in characters; None leaves the lines as they are.
        indent: of the second and every further line of a line that was broken, beside the line's own.
    """
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
