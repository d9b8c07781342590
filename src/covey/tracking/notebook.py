"""One output of a notebook cell, which is updated in place."""

from __future__ import annotations

import io
import sys
import time
import warnings
from typing import Any

from rich.console import RenderableType

from covey.tracking.output import plain_console

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
