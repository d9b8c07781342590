"""Which checkpoint besides the newest ones is kept, and the file `best.json` that names it.

A run that keeps its best checkpoint writes `checkpoints/best.json`, {"step": 40}, whenever that changes. The step is
also in the progress of every checkpoint, and a resumed run writes the file again, so a crash in between loses nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol

from covey.config.files import sync
from covey.config.model_sources import BEST_FILE


class Pinned(Protocol):
    """Chooses the checkpoint that is kept besides the newest ones."""

    def steps(self, best: int) -> set[int]:
        """Steps whose checkpoints are kept if `best` has the best held-out score; 0: there was no evaluation."""

    def mark(self, folder: Path, best: int, *, exists: bool) -> None:
        """Name the best checkpoint in the folder of checkpoints; `exists` is False if it has none of that step."""


class NothingPinned:
    """Null object: the newest checkpoints alone are kept."""

    def steps(self, best: int) -> set[int]:
        """Empty."""
        return set()

    def mark(self, folder: Path, best: int, *, exists: bool) -> None:
        """Nothing to do."""


class BestPinned:
    """Keeps the checkpoint with the best held-out score."""

    def steps(self, best: int) -> set[int]:
        return {best}

    def mark(self, folder: Path, best: int, *, exists: bool) -> None:
        path = folder / BEST_FILE
        if not exists:
            path.unlink(missing_ok=True)
            return
        content = json.dumps({"step": best}) + "\n"
        if path.is_file() and path.read_text() == content:
            return
        draft = folder / f"{BEST_FILE}.tmp"
        draft.write_text(content)
        sync(draft)
        os.replace(draft, path)
