"""Compares the steps that a resumed run samples again with their records from before.

A resumed run begins at its last checkpoint, so steps that were recorded after it are sampled and graded again. If
everything is repeatable, their rollouts are the same. If an environment, a reward or a sampler is not, they differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from covey.config.files import open_below

if TYPE_CHECKING:  # covey.data imports torch, and a mistake in a recipe is reported before that
    from covey.data import StepRecord

NOT_COMPARED = {"columns", "extra"}  # may have objects or times of the user's; training reads neither
Digests = dict[str, str]  # key of a line -> checksum of its values in all lines


def digests(path: Path) -> Digests:
    """Checksums of a file of rollouts, one for each key of its lines; {} if it is missing or damaged."""
    found: dict[str, list[tuple[int, str]]] = {}
    try:
        with open_below(path.parent, path.name) as file:
            for number, line in enumerate(file):
                for key, value in json.loads(line.decode("utf-8", "surrogateescape")).items():
                    if key not in NOT_COMPARED:
                        found.setdefault(key, []).append((number, json.dumps(value)))
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {key: sha256(repr(values).encode()).hexdigest() for key, values in found.items()}


class RepeatedSteps:
    """An observer that says so once if a step differs from its record before the resume."""

    def __init__(
        self, before: Mapping[int, Digests], rollouts_path: Callable[[int], Path], note: Callable[[str], None]
    ) -> None:
        """
        Args:
            before: the digests of the steps' former records.
            rollouts_path: the file of a step's rollouts.
            note: shows a line to the user.
        """
        self._before, self._path, self._note = dict(before), rollouts_path, note

    def record(self, step: StepRecord) -> None:
        """Compare a step, which is recorded already."""
        before = self._before.pop(step.step, {})
        if not before:
            return
        now = digests(self._path(step.step))
        different = [key for key in before | now if before.get(key) != now.get(key)]
        if different:
            self._before.clear()  # later steps differ because this one does
            self._note(
                f"step {step.step} was sampled again, and its rollouts differ from those that were recorded before the "
                f"resume (in {', '.join(different)}): the environment, a reward or the sampler is not repeatable, so "
                "this run is not that of an uninterrupted one"
            )
