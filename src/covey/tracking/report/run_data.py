"""What a report shows of a run, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.recipe import config_from_dict
from covey.tracking.diagnosis import Finding, diagnose
from covey.tracking.evaluations import evaluations_of
from covey.tracking.metric_table import MetricTable
from covey.tracking.run_reader import RunReader, kind_of_run, number, table, text
from covey.tracking.run_state import RunState, run_state
from covey.tracking.wording import WORDINGS, Wording


@dataclass(frozen=True)
class RunData:
    """One run of a report."""

    run_dir: Path
    name: str  # unique in the report
    reproduce: str  # the command that trains the same again; empty if unknown
    color: int  # its place among the colours of the charts
    metrics: MetricTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", MetricTable(self.run_dir))
        self.metrics.update()

    @property
    def anchor(self) -> str:
        """The id of the run's part of the page."""
        return f"run-{self.color + 1}"

    @cached_property
    def reader(self) -> RunReader:
        return RunReader(self.run_dir)

    @cached_property
    def state(self) -> RunState:
        return run_state(self.run_dir)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The config as tables; {} if it is missing."""
        return self.reader.config() or table(self.reader.origin().get("config"))

    @cached_property
    def config(self) -> RunConfig | ControlConfig | None:
        """The config; None if this version of covey cannot read it."""
        with suppress(ConfigError, TypeError, ValueError):
            return config_from_dict(dict(self.tables))
        return None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json or stopped.json; {} before there is one."""
        return self.reader.summary() or {}

    @cached_property
    def wording(self) -> Wording:
        """The texts for this kind of run."""
        domain, kind = kind_of_run(self.tables or None, self.summary)
        fallback = WORDINGS["language", "score"]
        return WORDINGS.get((domain or "", kind or ""), fallback)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Results before and after training by token limit; before the end the last evaluation during training."""
        found = evaluations_of(self.reader, self.tables, self.summary)
        if found:
            return found
        before = self.reader.origin().get("before")
        first = table(before[0]) if isinstance(before, list) and before else {}
        score = number(first.get("score"))
        if score is None:
            return []
        known = {key: number(first.get(key)) for key in ("low", "high", "count")}
        before = {"score": score, **known}
        return [{"max_new_tokens": first.get("max_new_tokens"), "before": before, "after": None, "kinds": []}]

    @cached_property
    def findings(self) -> list[Finding]:
        return diagnose(self.metrics.rows(), self.tables, self.summary.get("evaluations") or ())

    @cached_property
    def machine(self) -> dict[str, Any]:
        """Versions and hardware."""
        return table(self.summary.get("machine")) or table(self.reader.origin().get("environment"))

    @property
    def recipe(self) -> str:
        return text(self.summary.get("recipe")) or text(self.reader.origin().get("recipe"))

    @property
    def seconds(self) -> float | None:
        """Time of training and evaluations; before the end of the run that of its steps."""
        known = number(self.summary.get("seconds"))
        return sum(self.points("time/step")[1]) if known is None and self.metrics.steps else known

    def points(self, name: str, x_metric: str | None = None) -> tuple[list[float], list[float]]:
        """The x values at which a metric was measured, and its values.

        Args:
            x_metric: the x axis; None for that of the kind of run.
        """
        column = self.metrics.columns.get(name)
        if column is None:
            return [], []
        axis = self.wording.x_metric if x_metric is None else x_metric
        x: Sequence[float] | None = self.metrics.steps if axis == "step" else self.metrics.columns.get(axis)
        pairs = [
            (float(a), float(b)) for a, b in zip(x or (), column, strict=True) if math.isfinite(a) and math.isfinite(b)
        ] if x is not None else []  # fmt: skip
        return [a for a, _ in pairs], [b for _, b in pairs]


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder; its path if several have the same name."""
    names = [folder.name or str(folder) for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted names: {"task": {"name": "dataset"}} as {"task.name": "dataset"}."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for place, item in enumerate(value, start=1):
                found |= flat(item, f"{prefix}{key}[{place}].")
        else:
            found[f"{prefix}{key}"] = value
    return found
