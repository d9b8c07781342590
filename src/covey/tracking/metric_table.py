"""The columns of `metrics.jsonl`, read while a run writes it."""

from __future__ import annotations

import bisect
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

import orjson

from covey.config.files import open_below
from covey.tracking.run_folder import METRICS_FILE

LONGEST_LINE = 4 << 20  # bytes; a longer one counts as damaged
MOST_COLUMNS = 1000  # metrics of a run; later ones are left out
MOST_VALUES = 16 << 20  # steps times metrics; then every second step is dropped
LARGEST_FILE = 4 << 30  # bytes; a larger file has no steps
_CHUNK = 1 << 20
_TAIL = 64  # bytes before the place that was read last; if they change, the file is another one


class MetricTable:
    """The recorded steps of a run as columns, extended by `update` as the file grows.

    A last line without its end is left for the next update. Damaged lines are counted and skipped. If the file is
    replaced or shorter, or if its steps fall, as after a resume, the steps taken back are forgotten and `generation`
    grows.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.damaged = 0
        self._offset = 0  # of the first byte that was not read
        self._tail = b""
        self._file: tuple[int, int] | None = None  # device and inode
        self._skips = False  # the rest of an over-long line

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 before the first."""
        return self.steps[-1] if self.steps else 0

    def update(self) -> bool:
        """Read what was added to the file; returns True if the table changed. A missing file has no steps."""
        try:
            with open_below(self.run_dir, METRICS_FILE) as file:
                return self._read(file)
        except OSError:
            changed = bool(self.steps)
            if self._file is not None:
                self.generation += changed
                self._forget()
            return changed

    def _read(self, file: BinaryIO) -> bool:
        status, before = os.fstat(file.fileno()), (len(self.steps), self.generation)
        if self._file is not None and not self._continues(file, status):
            self.generation += 1
            self._forget()
        self._file = status.st_dev, status.st_ino
        file.seek(self._offset)
        for line in self._whole_lines(file, status.st_size if status.st_size <= LARGEST_FILE else 0):
            self._append(line)
        file.seek(max(0, self._offset - _TAIL))
        self._tail = file.read(min(_TAIL, self._offset))
        return (len(self.steps), self.generation) != before

    def _continues(self, file: BinaryIO, status: os.stat_result) -> bool:
        """True if the file is the one that was read before, possibly longer."""
        if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _whole_lines(self, file: BinaryIO, end: int) -> Iterator[bytes]:
        """The new lines before `end`, because a file could grow faster than it is read."""
        rest = b""
        while chunk := file.read(min(_CHUNK, max(0, end - file.tell()))):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                if self._skips:
                    self._skips = False
                else:
                    yield line
            if len(rest) > LONGEST_LINE:
                self._offset += len(rest)
                self.damaged += not self._skips
                self._skips, rest = True, b""

    def _append(self, line: bytes) -> None:
        record = parse_metrics(line)
        if record is None:
            self.damaged += 1
            return
        step = record.pop("step")
        if step <= self.last_step:
            self._take_back(step)
        self.steps.append(step)
        count = len(self.steps)
        if list(record) == list(self.columns):  # as in most steps
            for column, value in zip(self.columns.values(), record.values(), strict=True):
                column.append(value)
        else:
            self._append_by_name(record)
        if count * len(self.columns) > MOST_VALUES:
            self._thin()

    def _append_by_name(self, record: Mapping[str, float]) -> None:
        new = [name for name in record if name not in self.columns]
        for name in new[: MOST_COLUMNS - len(self.columns)]:
            self.columns[name] = array("d", [math.nan]) * (len(self.steps) - 1)
        for name, column in self.columns.items():
            column.append(record.get(name, math.nan))

    def _take_back(self, step: int) -> None:
        self.generation += 1
        kept = bisect.bisect_left(self.steps, step)
        for column in (self.steps, *self.columns.values()):
            del column[kept:]  # type: ignore[attr-defined]

    def _thin(self) -> None:
        """Drop every second step, but not the last."""
        first = (len(self.steps) - 1) % 2
        self.steps = self.steps[first::2]
        self.columns = {name: column[first::2] for name, column in self.columns.items()}

    def rows(self) -> Sequence[Mapping[str, float | None]]:
        """The steps as mappings from "step" and the metrics to numbers, without those that a step does not have."""
        return _Rows(self)


class _Rows(Sequence[Mapping[str, "float | None"]]):
    """A view of a table: the mapping of a step is made when it is asked for."""

    def __init__(self, table: MetricTable) -> None:
        self._steps, self._columns = table.steps, table.columns
        self._count = len(self._steps)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._count))]
        if not -self._count <= place < self._count:
            raise IndexError(place)
        place %= self._count
        row: dict[str, float | None] = {"step": self._steps[place]}
        return row | {n: column[place] for n, column in self._columns.items() if not math.isnan(column[place])}


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """A line of `metrics.jsonl`: "step" and numbers, NaN for null; None if it is damaged."""
    try:
        record: dict[str, Any] = _object_of(line)
        step = record.pop("step")
        if type(step) is not int or not 1 <= step < 1 << 53:
            return None
        kinds = set(map(type, record.values()))
        if not kinds <= {int, float, NoneType}:
            return None
        if kinds != {float}:
            record = {name: math.nan if value is None else float(value) for name, value in record.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    record["step"] = step
    return record


def _object_of(line: bytes) -> Any:
    try:
        return orjson.loads(line)  # five times as fast
    except orjson.JSONDecodeError:
        return json.loads(str(line, "utf-8"))  # numbers that are not finite: JSON has none
