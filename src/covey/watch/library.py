"""The watched runs: which there are, and how far each has got."""

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from covey.config.fields import printable
from covey.config.files import read_end, status_below
from covey.config.model_sources import CONFIG_FILE
from covey.tracking.evaluations import evaluations_of
from covey.tracking.run_folder import METRICS_FILE, STOPPED_FILE, SUMMARY_FILE, find_runs, last_change, run_state
from covey.tracking.run_reader import MetricTable, RunReader, kind_of_run, number, table, text
from covey.tracking.run_store import parse_metrics
from covey.watch.files import last_recording

SEARCH_SECONDS = 2.0  # least time between two searches for runs
LOOK_SECONDS = 0.5  # least time between two looks at a run's files
LAST_BYTES = 1 << 18  # read from the end of a metrics file: more than its last line
MOST_TABLE_VALUES = 16 << 20  # of the tables in memory, in all runs
Signature = tuple[tuple[int, int, int, int] | None, ...]


class Run:
    """One watched run."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.id = run_id(folder)
        self.reader = RunReader(folder)
        self.lock = threading.RLock()  # held while the table is read or changed
        self._table: MetricTable | None = None
        self._replaced = 0  # times that the metrics file was seen to be replaced or shortened
        self._looked = 0.0
        self._signature: Signature = ()
        self._state = ""
        self._last: dict[str, Any] = {}
        self._cached: dict[str, tuple[Any, Any]] = {}

    def table(self) -> MetricTable:
        """The metrics, up to date. Use it with `lock` held."""
        with self.lock:
            if self._table is None:
                self._table = MetricTable(self.folder)
            self._table.update()
            return self._table

    def forget_table(self) -> None:
        """Free the memory of the metrics, which are read again when they are needed."""
        with self.lock:
            if self._table is not None:
                self._replaced += self._table.generation
                self._table = None

    @property
    def table_values(self) -> int:
        """Numbers in memory."""
        known = self._table
        return len(known.steps) * (len(known.columns) + 1) if known is not None else 0

    @property
    def generation(self) -> int:
        """Grows when recorded steps were taken back."""
        known = self._table
        return self._replaced + (known.generation if known is not None else 0)

    def look(self) -> None:
        """Notice what has changed in the folder; cheap, and at most every half second."""
        with self.lock:
            if time.monotonic() - self._looked < LOOK_SECONDS:
                return
            names = (METRICS_FILE, SUMMARY_FILE, STOPPED_FILE, CONFIG_FILE)
            signature = tuple(map(self._file_signature, names))
            before, now = self._signature[:1] or (None,), signature[:1]
            if before != now or not self._looked:
                if self._table is not None:
                    self._table.update()
                elif before[0] and (not now[0] or before[0][:2] != now[0][:2] or now[0][2] < before[0][2]):
                    self._replaced += 1
                self._last = self._read_last()
            self._state = str(run_state(self.folder))
            self._signature, self._looked = signature, time.monotonic()

    def describe(self) -> dict[str, Any]:
        """The table RUN of the API."""
        self.look()
        config, summary = self.config or {}, self.summary or {}
        domain, kind = kind_of_run(self.config, self.summary)
        first = next(iter(self.evaluations), {})
        return {
            "id": self.id,
            "name": printable(self.name),
            "path": str(self.folder),
            "state": self._state,
            "domain": domain,
            "score_kind": kind,
            "recipe": text(summary.get("recipe")) or text(table(self.origin.get("launch")).get("recipe")) or None,
            "algorithm": text(config.get("algorithm")) or None,
            "seconds": number(summary.get("seconds")),
            "seed": config.get("seed", summary.get("seed")),
            "steps": config.get("steps"),
            "result": {"before": first.get("before"), "after": first.get("after")} if first else None,
            "score": number(self._last.get("score/mean")),
            **self.progress(),
        }

    def progress(self) -> dict[str, Any]:
        """The data of the event `run`."""
        self.look()
        return {
            "id": self.id,
            "state": self._state,
            "last_step": self._last.get("step", 0),
            "generation": self.generation,
            "updated": max(last_change(self.folder), last_recording(self.folder)) or None,
        }

    @property
    def config(self) -> dict[str, Any] | None:
        return (
            self._cache("config", self._signature[3:], self.reader.config) or table(self.origin.get("config")) or None
        )

    @property
    def summary(self) -> dict[str, Any] | None:
        return self._cache("summary", self._signature[1:3], self.reader.summary)

    @cached_property
    def origin(self) -> dict[str, Any]:
        return self.reader.origin()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Before and after by token limit, from the summary or, before there is one, from the held-out answers."""
        steps = self.reader.held_out_steps()
        version = (self._signature[1:3], steps[:1], steps[-1:])
        return self._cache("evaluations", version, lambda: evaluations_of(self.reader, self.config, self.summary))

    def _cache(self, name: str, version: Any, read: Any) -> Any:
        with self.lock:
            if name not in self._cached or self._cached[name][0] != version:
                self._cached[name] = version, read()
            return self._cached[name][1]

    def _file_signature(self, name: str) -> tuple[int, int, int, int] | None:
        status = status_below(self.folder, name)
        return status and (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def _read_last(self) -> dict[str, Any]:
        """The last complete line of the metrics file; {} if there is none near its end."""
        with suppress(OSError):
            lines = read_end(self.folder, METRICS_FILE, most=LAST_BYTES)[0].split(b"\n")[:-1]
            return next((record for line in reversed(lines) if (record := parse_metrics(line))), {})
        return {}


class Library:
    """The runs below folders, and runs that were named."""

    def __init__(self, roots: Sequence[Path], named: Sequence[Path] = ()) -> None:
        self.roots, self._named = [root.resolve() for root in roots], [folder.resolve() for folder in named]
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._searched = float("-inf")

    def runs(self) -> list[Run]:
        """The runs that exist now, in no order."""
        with self._lock:
            if time.monotonic() - self._searched >= SEARCH_SECONDS:
                self._search()
                self._searched = time.monotonic()
            return list(self._runs.values())

    def find(self, id: str) -> Run | None:
        """The run with this id; None if there is none."""
        with self._lock:
            run = self._runs.get(id)
        return run or next((run for run in self.runs() if run.id == id), None)

    def make_room(self, kept: Run) -> None:
        """Free tables of other runs if those in memory are too large."""
        with self._lock:
            runs = [run for run in self._runs.values() if run is not kept and run.table_values]
        total = sum(run.table_values for run in runs) + kept.table_values
        for run in runs:
            if total <= MOST_TABLE_VALUES:
                return
            total -= run.table_values
            run.forget_table()

    def _search(self) -> None:
        found = [folder for folder in self._named if folder.is_dir()]
        for root in self.roots:
            found += [folder.resolve() for folder in find_runs(root)]
        folders = list(dict.fromkeys(found))
        names = dict(zip(folders, short_names(folders), strict=True))
        known = {run.folder: run for run in self._runs.values()}
        runs = [known.get(folder) or Run(folder, "") for folder in folders]
        for run in runs:
            run.name = names[run.folder]
        self._runs = {run.id: run for run in runs}


def run_id(folder: Path) -> str:
    """The id of a run in addresses: the name of its folder, and a part of a hash of its path."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name)[:60].strip("-") or "run"
    return f"{readable}.{hashlib.sha256(str(folder).encode(errors='surrogateescape')).hexdigest()[:8]}"


def short_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with as many of its parents as make it unique."""
    names = [folder.name for folder in folders]
    for depth in range(2, 64):
        twice = {name for name, count in Counter(names).items() if count > 1}
        if not twice:
            break
        names = [
            "/".join(folder.parts[-depth:]).replace("//", "/") if name in twice else name
            for name, folder in zip(names, folders, strict=True)
        ]
    return names
