"""The tracker MLflow: the store of MLFLOW_TRACKING_URI, by default MLflow's SQLite file in the working folder."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.tracking.trackers.rows import COLUMNS, Row
from covey.tracking.trackers.tracker import NEW, Position, TrackedRun, flat

EXPERIMENT = "covey"  # unless MLFLOW_EXPERIMENT_NAME names another
PARAMETERS_AT_ONCE = 100  # MLflow's limits
LONGEST_PARAMETER, LONGEST_NAME = 6_000, 250
PROBE = "time/step"  # a metric of every step
TABLE = "rollouts.json"


class MLflowTracker:
    """Logs to a run of MLflow through its client, which leaves the global run of the user's own code as it is.

    Implements `Tracker`. The position's id has the URI of the store and the run's id.
    """

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # records of usage to its developers
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")  # it logs the traceback of a fault that covey reports
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Begin a run, or continue the one of the position."""
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        uri, _, self._id = position.id.rpartition(" ") if position else (_absolute(mlflow.get_tracking_uri()), "", "")
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        if position is not None:
            self._client.update_run(self._id, status="RUNNING")
            last = max((point.step for point in self._client.get_metric_history(self._id, PROBE)), default=NEW)
            position = replace(position, step=max(position.step, last))
            self._drop_rows_after(position.step)
            return position
        created = self._client.create_run(self._experiment(), run_name=run.name, tags={"recipe": run.recipe})
        self._id = created.info.run_id
        parameters = [
            Param(name[:LONGEST_NAME], str(value)[:LONGEST_PARAMETER]) for name, value in flat(run.config).items()
        ]
        for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=parameters[first : first + PARAMETERS_AT_ONCE])
        return Position(f"{uri} {self._id}")

    def _experiment(self) -> str:
        """The id of the experiment, which is created if there is none."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:  # another run may just have created it
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _drop_rows_after(self, step: int) -> None:
        """Remove the rows of later steps, which a process leaves if it is killed between a step's table and metrics.

        A table that is damaged, because the process was killed while MLflow copied it, is emptied.
        """
        if TABLE not in [file.path for file in self._client.list_artifacts(self._id)]:
            return
        with tempfile.TemporaryDirectory() as folder:
            text = Path(self._client.download_artifacts(self._id, TABLE, folder)).read_text(encoding="utf-8")
        try:
            rows = json.loads(text)["data"]
        except ValueError:
            rows = None
        kept = [row for row in rows or () if row[COLUMNS.index("step")] <= step]
        if kept != rows:
            self._client.log_dict(self._id, {"columns": COLUMNS, "data": kept}, TABLE)

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Add the rollouts to the table, and then log the metrics in one transaction."""
        now = int(time.time() * 1000)
        points = [self._metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        if rollouts:
            columns = {name: [row[place] for row in rollouts] for place, name in enumerate(COLUMNS)}
            self._client.log_table(self._id, columns, TABLE)
        self._client.log_batch(self._id, metrics=points)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Add the file `summary.json`, and set the run's status."""
        if summary is not None:
            self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_terminated(self._id, "KILLED" if summary is None else "FINISHED")


def _absolute(uri: str) -> str:
    """The URI with the path of a SQLite file made absolute, because a resumed run may have another working folder."""
    path = uri.removeprefix("sqlite:///")
    return uri if path == uri or path.startswith("/") else f"sqlite:///{Path(path).absolute()}"


def _allowed(name: str) -> str:
    """The name of a metric with the characters that MLflow allows, for the names of a user's reward functions."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:LONGEST_NAME]
