"""The answers of the API, as values for JSON; the docstring of `server` describes them."""

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from covey.config import ConfigError
from covey.config.fields import iter_fields
from covey.config.files import open_below, status_below
from covey.config.recipe import config_from_dict
from covey.tracking.evaluations import compare_answers, read_answers, token_limits
from covey.tracking.metrics import METRICS, find
from covey.tracking.run_reader import MetricTable, number, ranges, rollouts_file, table
from covey.tracking.wording import LOSS, WORDINGS, has_interval, is_above
from covey.watch.files import recordings
from covey.watch.index import Indexer, Query, index_path, progress, select
from covey.watch.library import Library, Run
from covey.watch.rollouts import group_page, group_row

MOST_CACHED = 64  # answers that are kept
_ORDER = {name: place for place, name in enumerate(METRICS)}


class NotFound(Exception):
    """There is no such run, step or group; the message is one line."""


Advise = Callable[[Path], dict[str, str]]


def no_advice(_: Path) -> dict[str, str]:
    """No advice on any run."""
    return {}


class Answers:
    """The answers about the runs of a library. Its methods may be called from several threads.

    Args:
        library: the runs.
        indexer: keeps the indexes of rollouts; None for a report, which has none.
        advise: from a run folder the texts "repeat", the command that trains the same again, and "next", what to do
            after the run; those that are not known are absent.
    """

    def __init__(self, library: Library, indexer: Indexer | None, advise: Advise = no_advice) -> None:
        self.library, self.indexer, self._advise = library, indexer, advise
        self._kept: OrderedDict[Any, Any] = OrderedDict()

    def find(self, id: str) -> Run:
        """The run with this id.

        Raises:
            NotFound: if there is none.
        """
        run = self.library.find(id)
        if run is None:
            raise NotFound("there is no such run")
        return run

    def runs(self) -> dict[str, Any]:
        described = sorted((run.describe() for run in self.library.runs()), key=lambda run: -(run["updated"] or 0))
        roots = self.library.roots
        return {
            "runs": described,
            "root": str(roots[0]) if len(roots) == 1 else None,
            "version": version("covey"),
        }

    def run(self, id: str) -> dict[str, Any]:
        run = self.find(id)
        described = run.describe()
        advice = self._advise(run.folder)
        names = self._metrics(run, lambda metrics: list(metrics.columns))
        held_out = run.reader.held_out_steps()
        return described | {
            "config": run.config,
            "summary": run.summary,
            "evaluations": run.evaluations,
            "verdict": verdict(run),
            "next": advice.get("next"),
            "repeat": advice.get("repeat"),
            "defaults": self._keep(("defaults", id, repr(run.config)), lambda: _defaults(run.config)),
            "machine": table((run.summary or {}).get("machine")) or table(run.origin.get("environment")),
            "metrics": sorted(map(_definition, names), key=lambda metric: (_place(metric["name"]), metric["name"])),
            "wording": _wording(described["domain"], described["score_kind"]),
            "steps_with_rollouts": ranges(steps := run.reader.rollout_steps()),
            "held_out_steps": held_out,
            "token_limits": self._token_limits(run, held_out),
            "records_tokens": bool(steps) and self._records_tokens(run, steps[-1]),
            "iterations": run.reader.iterations(),
            "files": recordings(run.folder),
            "index": self._index(run) if self.indexer else None,
        }

    def metrics(
        self, id: str, names: Sequence[str] | None, points: int, after: int, last: int | None
    ) -> dict[str, Any]:
        run = self.find(id)
        found = self._metrics(run, lambda metrics: curves(metrics, names, points, after, last))
        return found | {"generation": run.generation}

    def groups(self, id: str, step: int) -> dict[str, Any]:
        run = self.find(id)

        def read() -> dict[str, Any]:
            groups, damaged = run.reader.groups(step)
            return {"step": step, "groups": [group_row(group) for group in groups], "damaged": damaged}

        return self._keep(("groups", id, step, self._signature(run, step)), read)

    def group(self, id: str, step: int, group: int) -> dict[str, Any]:
        run = self.find(id)
        self._signature(run, step)
        groups, _ = run.reader.groups(step, group)
        if not groups:
            raise NotFound(f"step {step} has no group {group}")
        return group_page(step, groups[0])

    def rollouts(self, id: str, query: Query) -> dict[str, Any]:
        run = self.find(id)
        index = self._index(run, texts=bool(query.text))
        try:
            found = select(run.folder, index_path(run.folder), query)
        except sqlite3.Error:  # it is not there yet, or of another version, which the indexer replaces
            found = {"total": None, "offset": query.offset, "next_offset": None, "rollouts": []}
        return found | {"index": index}

    def held_out(
        self, id: str, first: int | None, last: int | None, max_new_tokens: int | None, **choice: Any
    ) -> dict[str, Any]:
        run = self.find(id)
        steps = run.reader.held_out_steps()
        if not steps:
            raise NotFound("the run has no held-out answers")
        first, last = steps[0] if first is None else first, steps[-1] if last is None else last
        for step in (first, last):
            if step not in steps:
                raise NotFound(f"the run has no held-out answers of step {step}")
        before, after = read_answers(run.reader, first), read_answers(run.reader, last)
        limits = token_limits([before, after])
        limit = max_new_tokens if max_new_tokens is not None else next(iter(limits), None)
        if limit is not None and limit not in limits:
            raise NotFound(f"these evaluations have no answers of at most {limit} tokens")
        answers = [found.get(limit, {}) if limit is not None else {} for found in (before, after)]
        compared = compare_answers(*answers, **choice)
        return {"first": first, "last": last, "max_new_tokens": limit, **compared}

    def diagnosis(self, id: str) -> dict[str, Any]:
        run = self.find(id)
        run.look()
        key = ("diagnosis", id, run.generation, run.progress()["last_step"])
        return self._keep(key, lambda: self._diagnose(run))

    def _index(self, run: Run, *, texts: bool = False) -> dict[str, Any]:
        """The table INDEX of the API, after the index was asked for."""
        if self.indexer is not None:
            self.indexer.ask(run.folder, texts=texts)
        return progress(run.folder, index_path(run.folder))

    def _diagnose(self, run: Run) -> dict[str, Any]:
        from covey.tracking.diagnosis import diagnose

        config = run.config
        last = self._metrics(run, lambda metrics: metrics.last_step)
        if config is None or not last:
            return {"step": last, "findings": [], "available": False}
        findings = self._metrics(run, lambda metrics: diagnose(metrics.rows(), config, run.evaluations))
        listed = [asdict(one) if is_dataclass(one) and not isinstance(one, type) else one for one in findings]
        return {"step": last, "findings": listed, "available": True}

    def _metrics(self, run: Run, read: Callable[[MetricTable], Any]) -> Any:
        """What `read` returns for the metrics of a run."""
        with run.lock:
            found = read(run.table())
        self.library.make_room(run)
        return found

    def _keep(self, key: Any, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `read` returns, kept for the next time."""
        kept: dict[str, Any] | None = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = read()
            while len(self._kept) > MOST_CACHED:
                self._kept.popitem(last=False)
        return kept

    def _signature(self, run: Run, step: int) -> tuple[int, int, int]:
        """What changes when the file of a step's rollouts does.

        Raises:
            NotFound: if there is no such file.
        """
        status = status_below(run.folder, *rollouts_file(step))
        if status is None:
            with open_below(run.folder, *rollouts_file(step)):  # says why
                pass
            raise NotFound(f"the run has no rollouts of step {step}")
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _token_limits(self, run: Run, steps: Sequence[int]) -> list[int]:
        if not steps:
            return []
        key = ("limits", run.id, run.generation, steps[0], steps[-1], run.progress()["updated"])
        kept = self._keep(key, lambda: {"limits": token_limits(read_answers(run.reader, step) for step in
                                                               dict.fromkeys((steps[0], steps[-1])))})  # fmt: skip
        return list(kept["limits"])

    def _records_tokens(self, run: Run, step: int) -> bool:
        try:
            key = ("tokens", run.id, step, self._signature(run, step))
        except NotFound:
            return False
        return bool(self._keep(key, lambda: {"tokens": run.reader.has_tokens(step)})["tokens"])


def verdict(run: Run) -> dict[str, Any] | None:
    """The outcome at the training's token limit in one sentence; None before there are two evaluations."""
    first = next(iter(run.evaluations), {"before": None, "after": None})
    before, after = first["before"], first["after"]
    if before is None or after is None:
        return None
    described = run.describe()
    wording = WORDINGS.get((described["domain"] or "", described["score_kind"] or ""), WORDINGS["language", "score"])
    kind, so_far = wording.kind, "" if described["state"] == "finished" else " so far"
    outcome = "better" if is_above(after, before) else "worse" if is_above(before, after) else "unclear"
    words = {"better": "Better", "worse": "Worse", "unclear": "No certain change"}[outcome]
    apart = "; the intervals overlap" if outcome == "unclear" and has_interval(before) and has_interval(after) else ""
    words = "Held-out loss" if kind is LOSS else words  # a mean without an interval
    sentence = f"{words}{so_far}: from {kind.write(before['score'])} to {kind.write(after['score'])}{apart}."
    expected = number((run.summary or {}).get("expected_return"))
    if expected is not None and not so_far:
        reached = "is reached" if after["score"] >= expected else "is not reached"
        sentence += f" The expected {kind.name} of {kind.write(expected)} {reached}."
    return {"outcome": outcome, "text": sentence}


def _defaults(config: dict[str, Any] | None) -> dict[str, Any]:
    """The default of every field of a config by its dotted name; {} if this version cannot read it."""
    try:
        fields = iter_fields(config_from_dict(dict(config or {})))
        return {name: list(item.default) if isinstance(item.default, tuple) else item.default
                for name, item, _, _ in fields if item.default is not MISSING}  # fmt: skip
    except (ConfigError, TypeError, ValueError):
        return {}


def _definition(name: str) -> dict[str, Any]:
    """A metric with its entry in the glossary; empty texts if it has none."""
    try:
        metric = find(name)
    except KeyError:
        return {"name": name, "unit": "", "meaning": "", "healthy": ""}
    return {"name": name, "unit": metric.unit, "meaning": metric.meaning, "healthy": metric.healthy}


def _place(name: str) -> int:
    try:
        return _ORDER[find(name).name]
    except KeyError:
        return len(_ORDER)


def _wording(domain: str | None, kind: str | None) -> dict[str, Any] | None:
    """The texts of a run; None if its domain is unknown."""
    wording = WORDINGS.get((domain or "", kind or "score"))
    if wording is None:
        return None
    return {
        "measured": wording.measured,
        "evaluation": wording.evaluation.partition(", {")[0],
        "x_metric": wording.x_metric,
        "x_label": wording.x_label,
        "prompt": wording.prompt,
        "score_name": wording.kind.name,
        "counted": wording.counted,
    }


FEWEST_POINTS, MOST_POINTS, POINTS = 2, 5000, 600


def curves(
    table: MetricTable, names: Sequence[str] | None, points: int, after: int, last: int | None
) -> dict[str, Any]:
    """Metrics of the steps after `after` up to `last`, in at most `points` buckets of about equal numbers of steps.

    Args:
        names: the metrics, without which all; unknown ones are left out.
    """
    steps = np.array(table.steps, np.int64)
    begin = int(np.searchsorted(steps, after, "right"))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
    count = max(0, end - begin)
    edges = begin + np.arange(min(points, count)) * count // max(1, min(points, count))  # first place of each bucket
    is_downsampled = count > points
    chosen = table.columns if names is None else [name for name in dict.fromkeys(names) if name in table.columns]
    series = {}
    for name in chosen:
        values = np.array(table.columns[name], np.float64)[:end]
        series[name] = _buckets(values, edges) if is_downsampled else {"mean": _plain(values[begin:])}
    lasts = np.append(edges[1:], end) - 1 if count else edges
    return {
        "last_step": table.last_step,
        "generation": table.generation,
        "downsampled": is_downsampled,
        "steps": steps[lasts].tolist(),
        "first_steps": steps[edges].tolist(),
        "series": series,
    }


def _buckets(values: np.ndarray, edges: np.ndarray) -> dict[str, list[float | None]]:
    """Mean, least and largest finite value of each bucket; None for a bucket without any."""
    values = np.where(np.isfinite(values), values, np.nan)
    counts = np.add.reduceat(~np.isnan(values), edges, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = np.add.reduceat(np.nan_to_num(values), edges) / counts
    return {
        "mean": _plain(means),
        "low": _plain(np.fmin.reduceat(values, edges)),
        "high": _plain(np.fmax.reduceat(values, edges)),
    }


def _plain(values: np.ndarray) -> list[float | None]:
    return [value if finite else None for value, finite in zip(values.tolist(), np.isfinite(values), strict=True)]
