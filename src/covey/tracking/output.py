"""Output of commands.

It survives the end of its reader (`covey train ... | head`), and names in foreign files, which may hold markup or
control characters, do not change the terminal.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger(__name__)
# Control characters, those that change the direction of a line, and escape sequences other than rich's.
_CONTROL = re.compile(
    r"\x1b(?!\[)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def plain_console(**options: Any) -> Console:
    """A console of rich that prints texts as they are, without markup and emoji codes; `options` are rich's."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


class _Outlasting:
    """A text stream whose writes never fail: if its reader has ended, output is dropped with one warning.

    Characters that change the terminal are replaced.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.ending = False  # True: the command is finished, so no warning is needed

    def write(self, text: str) -> int:
        try:
            self._stream.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
        except (OSError, ValueError) as error:
            self._lost(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # the rest of the stream's buffer is dropped too
            os.close(nowhere)
        if self._stream is sys.__stdout__ and not self.ending:
            why = error.strerror if isinstance(error, OSError) else str(error)
            _log.warning("the output cannot be written any more (%s): the command goes on without it", why)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def outlasting_output() -> Iterator[None]:
    """Context manager in which a failed write to standard output or error raises no error."""
    before = sys.stdout, sys.stderr
    if isinstance(before[0], _Outlasting):
        yield
        return
    sys.stdout, sys.stderr = _Outlasting(before[0]), _Outlasting(before[1])  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Outlasting):
                stream.ending = True
            stream.flush()
        sys.stdout, sys.stderr = before


def expect_early_end() -> None:
    """Print no warning if the reader of standard output ends first, such as head, or a pager that is closed."""
    if isinstance(sys.stdout, _Outlasting):
        sys.stdout.ending = True
