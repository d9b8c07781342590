"""Experiment trackers: every metric, the config, the summary and sampled rollouts, in the user's own tracker.

An observer of the loop hands the steps of a run to its trackers, each in a thread of its own. The run folder is the
record of a run, and a tracker has a copy of a part of it. If a tracker misses steps, because it fails or the process
is killed, a resumed run sends them from the folder.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import shutil
import string
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.fields import printable
from covey.config.files import faults_of, read_below
from covey.config.recipe import config_to_dict
from covey.config.sft import RewardModelTraining
from covey.tracking.console import last_turn
from covey.tracking.run_folder import TRACKERS_FOLDER
from covey.tracking.run_store import RunStore, read_metrics, rollout_record

if TYPE_CHECKING:  # covey.data imports torch, and a mistake in a recipe is reported before that
    from covey.data import StepRecord

CLOSING_SECONDS = 60.0  # wait for the trackers at the end of a run
WAITING_STEPS = 10_000  # most steps that wait for a tracker; one that is further behind hangs
TABLES = 50  # most steps of a run with a table of rollouts
GROUPS = 4  # groups in a table, of each the best and the worst rollout
CHARACTERS = 2_000  # of a prompt or a completion


class Trackers:
    """An `Observer` of the loop and a context manager. Without trackers it does nothing.

    A tracker that fails is reported once and left out for the rest of the process; the run goes on.
    """

    def __init__(
        self,
        adapters: Mapping[str, Tracker],
        run: TrackedRun,
        store: RunStore,
        config: RunConfig | ControlConfig | RewardModelTraining,
        note: Callable[[str], None],
    ) -> None:
        self._adapters, self._run, self._store, self._note = adapters, run, store, note
        self._threads: list[TrackerThread] = []
        self._steps = config.steps
        self._reported: set[str] = set()
        self._ended = False

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(None)

    def begin(self, before: Mapping[str, float], step: int) -> None:
        """Start the trackers: log the metrics before training and, in a resumed run, missing steps up to `step`.

        Raises:
            MachineError: if the folder for them cannot be created.
        """
        if self._adapters:
            with faults_of(self._run.folder):
                self._run.folder.mkdir(exist_ok=True)
        self._threads = [TrackerThread(name, adapter, self._run) for name, adapter in self._adapters.items()]
        first = Step(0, _finite(before))
        for thread in self._threads:
            thread.put(_from_folder(first, self._store, step, self._steps))

    def record(self, record: StepRecord) -> None:
        """Hand a finished step to the trackers, without waiting for them."""
        if not self._threads:
            return
        rows = rows_of(record) if has_table(record.step, self._steps) else []
        for thread in self._threads:
            thread.put([Step(record.step, _finite(record.metrics), lambda: rows)])
        self._report()

    def finish(self, summary: Mapping[str, Any], after: Mapping[str, float]) -> None:
        """Log the metrics after training and the summary, and wait for the trackers."""
        recorded = read_metrics(self._store.run_dir)[-1:] if self._threads else []
        measured = any(after.keys() <= record.keys() for record in recorded)  # among the metrics of the last step
        self._end(summary, None if measured else Step(summary["steps"], _finite(after)))

    def _end(self, summary: Mapping[str, Any] | None, result: Step | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.put((summary, result))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._report()

    def _report(self) -> None:
        for thread in self._threads:
            if thread.fault and thread.name not in self._reported:
                self._reported.add(thread.name)
                self._note(
                    f"warning: the tracker {thread.name} failed and is left out; the run goes on, and its folder has "
                    f"everything ({thread.fault})"
                )


def open_trackers(
    config: RunConfig | ControlConfig | RewardModelTraining, store: RunStore, recipe: str, note: Callable[[str], None]
) -> Trackers:
    """The trackers of a run, which begin with it.

    Raises:
        ConfigError: if one cannot be used on this machine.
    """
    run = TrackedRun(store.run_dir / TRACKERS_FOLDER, store.run_dir.absolute().name, recipe, config_to_dict(config))
    return Trackers({name: ADAPTERS[name]() for name in config.trackers}, run, store, config, note)


def _from_folder(first: Step, store: RunStore, last: int, steps: int) -> Iterator[Step]:
    """The steps of a run folder up to `last`, after `first`; read in the tracker's thread."""
    yield first
    if not last:
        return
    for record in read_metrics(store.run_dir):
        step = record["step"]
        if step > last:
            return
        metrics = {name: value for name, value in record.items() if name != "step"}
        path = store.rollouts_path(step) if has_table(step, steps) else None
        yield Step(step, _finite(metrics), partial(_rows_of_file, path))


def _rows_of_file(path: Path | None) -> list[Row]:
    """The table of a file of rollouts; empty if it cannot be read."""
    if path is None:
        return []
    try:
        return select_rows(json.loads(line) for line in read_below(path.parent, path.name).splitlines())
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True)
class Step:
    """What a tracker logs of one step. `rollouts` is called in the thread."""

    number: int
    metrics: Mapping[str, float]
    rollouts: Callable[[], Sequence[Row]] = tuple


Ending = tuple[Mapping[str, Any] | None, Step | None]  # the summary if the run is whole; the evaluation after training


class TrackerThread:
    """One tracker in its thread. The file `<name>.json` in the run folder keeps its position.

    A step waits in a queue until the tracker takes it. After an exception, or if the tracker falls too far behind, it
    is given no more: `fault` has the reason.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun) -> None:
        self.name, self.fault = name, ""
        self._tracker, self._run = tracker, run
        self._path = run.folder / f"{name}.json"
        self._queue: queue.Queue[Iterable[Step] | Ending] = queue.Queue(WAITING_STEPS)
        self._thread = threading.Thread(target=self._work, name=f"covey-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Iterable[Step] | Ending) -> None:
        """Log steps or end the run after those that wait, without waiting. Steps that the tracker has are left out."""
        if self.fault:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.fault = f"it is {WAITING_STEPS} steps behind"

    def join(self, seconds: float) -> None:
        """Wait for the end, at most this long."""
        self._thread.join(seconds)
        if self._thread.is_alive() and not self.fault:
            self.fault = f"it has not taken all steps within {seconds:.0f} s"

    def _work(self) -> None:
        try:
            position = self._tracker.start(self._run, read_position(self._path))
            self._keep(position)
            while not isinstance(item := self._queue.get(), tuple):
                for step in item:
                    if self.fault:
                        return
                    position = self._log(step, position)
            summary, result = item
            if result is not None and not position.evaluated:
                self._tracker.log(result.number, result.metrics, result.rollouts())
                position = replace(position, evaluated=True)
                self._keep(position)
            self._tracker.finish(summary)
        except BaseException as error:  # SystemExit too, which some packages raise
            self.fault = self.fault or " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def _log(self, step: Step, position: Position) -> Position:
        if step.number <= position.step:
            return position
        self._tracker.log(step.number, step.metrics, step.rollouts())
        position = replace(position, step=step.number)
        self._keep(position)
        return position

    def _keep(self, position: Position) -> None:
        """Replace the file, without fsync: a power cut may cost the position, and then the tracker begins a new run."""
        temporary = self._path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        temporary.write_text(json.dumps(asdict(position)), encoding="utf-8")
        temporary.replace(self._path)


def read_position(path: Path) -> Position | None:
    """The position in a file; None if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        position = Position(**json.loads(read_below(path.parent, path.name)))
        if isinstance(position.id, str) and type(position.step) is int and type(position.evaluated) is bool:
            return position
    return None


def has_table(step: int, steps: int) -> bool:
    """True for the first step, the last one, and about TABLES steps at equal distances."""
    return step in (1, steps) or step % max(1, -(-steps // TABLES)) == 0


def rows_of(record: StepRecord) -> list[Row]:
    """The table of a step's rollouts."""
    return select_rows(rollout_record(record.step, *rollout) for rollout in record.rollouts())


def select_rows(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The best and the worst graded rollout of the groups whose rewards differ most, from lines of a rollouts file."""
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["reward"] is not None:
            groups[record["group"]].append(record)
    ends = [(min(group, key=_reward), max(group, key=_reward)) for group in groups.values()]
    ends.sort(key=lambda pair: _reward(pair[0]) - _reward(pair[1]))  # stable, so groups alike keep their order
    return [
        _row(record) for worst, best in ends[:GROUPS] for record in ((best, worst) if best is not worst else (best,))
    ]


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["reward"])


def _row(record: Mapping[str, Any]) -> Row:
    shown = {"prompt": _clip(last_turn(record["prompt"])), "completion": _clip(record["text"])}
    return tuple({**record, **shown}[column] for column in COLUMNS)


def _clip(text: str) -> str:
    text = printable(text)
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 2] + " …"


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
