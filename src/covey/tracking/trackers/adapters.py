"""The adapters of TensorBoard, Weights & Biases, trackio and MLflow, and their protocol. Nothing else imports them."""

from __future__ import annotations

import json
import os
import re
import shutil
import string
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from covey.config import ConfigError

NAME = "covey"  # of the project or experiment, unless the tracker's environment variable names another
NEW = -1  # the last step of a tracker's run that has none yet; step 0 is the evaluation before training
COLUMNS = ("step", "group", "prompt", "completion", "reward", "score", "decisions", "end")  # of a table of rollouts
INIT_SECONDS, FINISH_SECONDS = 60.0, 45.0  # of wandb
LOCAL_MODES = ("offline", "disabled", "dryrun")  # of wandb
PARAMETERS_AT_ONCE = 100  # MLflow's limits
LONGEST_PARAMETER, LONGEST_NAME = 6_000, 250
PROBE = "time/step"  # a metric of every step
TABLE = "rollouts.json"  # in MLflow
_ESCAPED = str.maketrans(
    {character: f"&#{ord(character)};" for character in string.punctuation} | {"\n": " ⏎ ", "\r": " ", "\t": " "}
)

Row = tuple[Any, ...]


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker describes it."""

    folder: Path  # for what the tracker writes into the run folder
    name: str  # of the run folder
    recipe: str
    config: Mapping[str, Any]  # nested tables, as in config.toml


@dataclass(frozen=True)
class Position:
    """The place of a tracker in a run."""

    id: str  # by which the tracker finds its own run again
    step: int = NEW  # the last step that it has
    evaluated: bool = False  # True: the evaluation after training was logged


class Tracker(Protocol):
    """Adapter of an experiment tracker. All calls come from one thread; after an exception there are no more."""

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Begin a run of the tracker (None), or continue at a position; its step may be older than the tracker's last.

        Returns:
            The position: later steps are logged next.
        """

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Log finite metrics, named as in `metrics.jsonl`, and a table of rollouts, which is empty at most steps."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Log the content of `summary.json`, and end. None: the run has stopped before its end, and may be resumed."""


class TensorBoardTracker:
    """Writes event files in `trackers/tensorboard` of the run folder. A killed process loses none: all are flushed."""

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Open an event file. Readers discard the events of earlier files after the position (purge_step)."""
        from torch.utils.tensorboard import SummaryWriter

        position = position or Position("tensorboard")
        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=position.step + 1)  # type: ignore[no-untyped-call]
        if position.step == NEW:
            settings = [(name, json.dumps(value)) for name, value in flat(run.config).items()]
            self._writer.add_text("config", as_markdown(("field", "value"), settings), 0)
        return position

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Write scalars, and the rollouts as a table of text."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if rollouts:
            self._writer.add_text("rollouts", as_markdown(COLUMNS, rollouts), step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Write the summary as text, and close the file."""
        if summary is not None:
            pairs = [(name, json.dumps(value)) for name, value in flat(summary).items()]
            self._writer.add_text("summary", as_markdown(("key", "value"), pairs), summary["steps"])
        self._writer.close()


class _TableTracker:
    """A tracker whose package logs a dict of numbers and tables at a step."""

    _package: Any
    _run: Any

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Log metrics, and the rollouts as a table."""
        table = {}
        if rollouts:
            table = {"rollouts": self._package.Table(columns=list(COLUMNS), data=[list(row) for row in rollouts])}
        self._run.log({**metrics, **table}, step=step)


class WandbTracker(_TableTracker):
    """Logs to Weights & Biases: online, or in `trackers/wandb` of the run folder with WANDB_MODE=offline.

    Only what covey hands over is logged: no output of the terminal, no code, no repository, no state of the machine.
    """

    def __init__(self) -> None:
        """Check that there is an API key, because wandb would ask for it in the terminal.

        Raises:
            ConfigError: if there is none and the mode is online.
        """
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of faults in wandb to its developers
        if not self._is_local() and not os.environ.get("WANDB_API_KEY"):
            import wandb

            if not wandb.login(prompt=False):
                raise ConfigError(
                    "trackers: wandb has no API key on this machine: run `wandb login`, or set WANDB_MODE=offline, "
                    "which writes into the run folder"
                )

    def _is_local(self) -> bool:
        """True if nothing is sent, by the environment or by `wandb offline`."""
        if mode := os.environ.get("WANDB_MODE"):
            return mode in LOCAL_MODES
        import wandb

        return wandb.setup().settings.mode in LOCAL_MODES

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Begin a run, or continue the one with the position's id.

        Online, the server knows the last step. Offline files end at an unknown step if the process was killed, so they
        are replaced: the run's history is logged again.
        """
        import wandb

        folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        own = position.id if position else uuid.uuid4().hex[:8]
        for old in (folder / "wandb").glob(f"offline-run-*-{own}") if self._is_local() else ():
            shutil.rmtree(old)
        self._package = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", NAME),
            dir=str(folder),
            id=own,
            resume=None if self._is_local() else "allow",
            name=run.name,
            group=run.recipe,
            config=dict(run.config),
            reinit="create_new",  # a run that the user's own code has begun stays as it is
            settings=wandb.Settings(  # no output to the terminal, no record of code, output and machine
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
            ),
        )
        if position is None or not self._run.resumed:
            return Position(own)
        return replace(position, step=self._run.step - 1 if self._run.step else NEW)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Add the summary to the run's, and upload for at most FINISH_SECONDS; the rest stays in the folder."""
        if summary is not None:
            self._run.summary.update({"covey": dict(summary)})
        self._run.finish(exit_code=0)


class TrackioTracker(_TableTracker):
    """Logs to trackio: a local SQLite database, or the server or Space that its environment variables name.

    Its own measurements of the machine are off.
    """

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Begin a run, or continue the one with the position's name."""
        import trackio

        name = position.id if position else f"{run.name}-{uuid.uuid4().hex[:6]}"  # trackio finds a run by its name
        self._package = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", NAME),
            name=name,
            group=run.recipe,
            config=dict(run.config),
            resume="allow" if position else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if position is None:
            return Position(name)
        last = self._run._next_step - 1  # trackio's database, which it writes twice a second, may lack the last steps
        return replace(position, step=last)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Log the summary as a table of text, and write what waits."""
        if summary is not None:
            rows = [[name, str(value)] for name, value in flat(summary).items()]
            self._run.log({"summary": self._package.Table(columns=["key", "value"], data=rows)}, step=summary["steps"])
        self._run.finish()


class MLflowTracker:
    """Logs to the store of MLFLOW_TRACKING_URI, by default MLflow's SQLite file in the working folder.

    It uses MLflow's client, which leaves the global run of the user's own code as it is. The position's id has the URI
    of the store and the run's id.
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
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", NAME)
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


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names: {"loss.clip_low": 0.2}. Tables of a list are numbered from 1."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        tables = isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value)
        inner = {str(number): item for number, item in enumerate(value, start=1)} if tables else value
        if isinstance(inner, Mapping):
            values |= flat(inner, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown. All punctuation of its cells is escaped, so a completion is shown as text, not as markup."""
    lines = [" | ".join(str(cell).translate(_ESCAPED) for cell in row) for row in (columns, *rows)]
    lines.insert(1, " | ".join("---" for _ in columns))
    return "\n".join(f"| {line} |" for line in lines)


def _absolute(uri: str) -> str:
    """The URI with the path of a SQLite file made absolute, because a resumed run may have another working folder."""
    path = uri.removeprefix("sqlite:///")
    return uri if path == uri or path.startswith("/") else f"sqlite:///{Path(path).absolute()}"


def _allowed(name: str) -> str:
    """The name of a metric with the characters that MLflow allows, for the names of a user's reward functions."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:LONGEST_NAME]


ADAPTERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MLflowTracker,
}
