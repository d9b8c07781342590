"""Output of commands, and the output of a notebook cell that is updated in place.

It survives the end of its reader (`covey train ... | head`), and names in foreign files, which may hold markup or
control characters, do not change the terminal.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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


WIDTH = 100  # characters
DRAWN_SECONDS = 0.2  # minimum interval between updates that only move a progress bar
PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.2;font-family:monospace">{code}</pre>'


def in_notebook() -> bool:
    """True if IPython runs with a notebook's kernel. This does not import IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def ignore_missing_widgets() -> None:
    """In a notebook, ignore tqdm's warning that ipywidgets is missing, which covey does not need."""
    if in_notebook():
        warnings.filterwarnings("ignore", "IProgress not found")


class NotebookOutput:
    """Shows an object in the current cell and updates it in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._drawn = float("-inf")

    def draw(self, what: RenderableType, *, now: bool = True) -> None:
        """Replace the output; without `now` only if the last update was DRAWN_SECONDS ago."""
        if not now and time.monotonic() - self._drawn < DRAWN_SECONDS:
            return
        from IPython.display import display  # installed, because in_notebook found it

        console = plain_console(
            file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor",
            force_jupyter=False, legacy_windows=False,
        )  # fmt: skip
        console.print(what, soft_wrap=True)  # a long command stays on one line
        text = console.export_text(clear=False)
        forms = {"text/html": console.export_html(inline_styles=True, code_format=PAGE), "text/plain": text}
        if self._handle is None:
            self._handle = display(forms, raw=True, display_id=True)
        else:
            self._handle.update(forms, raw=True)
        self._drawn = time.monotonic()
