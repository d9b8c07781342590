"""Runs with a tracker, in processes of their own, and what the tracker's own reader finds of them."""

from __future__ import annotations

import html
import json
import os
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from helpers.run_helpers import Interrupt

if TYPE_CHECKING:
    from covey.data import StepRecord

WAIT_SECONDS = 300
# Nothing is sent, and nothing of the user's own settings is read.
LOCAL = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


def end_process(run_dir: Path) -> None:
    """As kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def end_wandb(run_dir: Path) -> None:
    """wandb's service process dies."""
    for child in psutil.Process().children(recursive=True):
        if "wandb-core" in " ".join(child.cmdline()):
            child.kill()
            child.wait(60)


def break_mlflow(run_dir: Path) -> None:
    """The database is overwritten."""
    for suffix in ("-wal", "-shm"):
        Path(f"mlflow.db{suffix}").unlink(missing_ok=True)
    Path("mlflow.db").write_bytes(b"no database" * 1000)


@dataclass(frozen=True)
class WhenTracked(Interrupt):
    """After step `step` was recorded and the tracker has step `has`: `then` in the process of the run.

    With `reward_model` when the training of the reward model that follows this step has its last weights.
    """

    module: str = ""
    name: str = ""
    step: int = 0
    has: int = 0
    then: Callable[[Path], None] = end_process
    reward_model: bool = False

    def prepare(self) -> None:
        from covey.llm.reward_models.training import IteratedRewardModel
        from covey.tracking.run_store import RunStore

        record, finish = RunStore.record, IteratedRewardModel._finish

        def recorded(store: RunStore, step: StepRecord) -> None:
            record(store, step)
            if step.step == self.step:

                def finished(model: IteratedRewardModel, *results: Any) -> None:
                    self._act(store.run_dir)
                    finish(model, *results)

                if self.reward_model:
                    IteratedRewardModel._finish = finished  # type: ignore[method-assign]
                else:
                    self._act(store.run_dir)

        RunStore.record = recorded  # type: ignore[method-assign]

    def _act(self, run_dir: Path) -> None:
        position = run_dir / "trackers" / f"{self.name}.json"
        deadline = time.monotonic() + WAIT_SECONDS
        while not position.is_file() or json.loads(position.read_text())["step"] < self.has:
            assert time.monotonic() < deadline, f"{self.name} has not begun"
            time.sleep(0.05)
        self.then(run_dir)


HOSTILE = '<script>alert(1)</script> | ![x](http://127.0.0.1/x) `a` *b* [c](javascript:d) \x1b[31m "&amp;" \u202e '


class HostileCompletions(Interrupt):
    """Every completion in the tables of trackers is long and hostile; the run goes on."""

    def prepare(self) -> None:
        from covey.tracking import trackers as observer

        record = observer.rollout_record
        observer.rollout_record = lambda *of, **more: record(*of, **more) | {"text": HOSTILE + "z" * 5000}


@dataclass
class Found:
    """What a tracker has of one run."""

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    tables: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    summary: str = ""
    runs: int = 1


def read_tensorboard(folder: Path, run_dir: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "trackers/tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found = Found()
    for name in events.Tags()["scalars"]:
        found.curves[name] = [(event.step, event.value) for event in events.Scalars(name)]
    texts = {
        name: {
            event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{name}/text_summary")
        }
        for name in ("rollouts", "config", "summary")
        if f"{name}/text_summary" in events.Tags()["tensors"]
    }
    for step, text in texts["rollouts"].items():
        head, _, *lines = [
            [html.unescape(cell.strip()) for cell in line.strip("| ").split(" | ")] for line in text.splitlines()
        ]
        found.tables[step] = [dict(zip(head, line, strict=True)) for line in lines]
    rows = [html.unescape(line).strip("| ").split(" | ") for line in texts["config"][0].splitlines()[2:]]
    found.config = {name: json.loads(value) for name, value in rows}
    found.summary = html.unescape("".join(texts.get("summary", {}).values()))
    return found


def read_wandb(folder: Path, run_dir: Path) -> Found:
    found = Found()
    files = sorted((run_dir / "trackers/wandb").glob("offline-run-*/*.wandb"))
    found.runs = len(files)
    for record in _wandb_records(files[-1].read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for name, value in values.items():
                if isinstance(value, int | float) and not name.startswith(("_", "rollouts/")):
                    found.curves[name].append((values["_step"], value))
            if "rollouts/path" in values:
                table = json.loads((files[-1].parent / "files" / values["rollouts/path"]).read_text())
                found.tables[values["_step"]] = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        elif kind == "run":
            found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "summary":
            changed = {"/".join([item.key, *item.nested_key]): item.value_json for item in record.summary.update}
            found.summary += "".join(text for name, text in changed.items() if name.startswith("covey"))
    return found


def _wandb_records(data: bytes) -> Iterator[Any]:
    """The records of wandb's file, a LevelDB log: blocks of 32 KiB with pieces of a checksum, a length and a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, part = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(part)
            yield record
            part = b""


def read_trackio(folder: Path, run_dir: Path) -> Found:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    project = os.environ["TRACKIO_PROJECT"]
    runs = list(trackio.Api().runs(project))
    found = Found(runs=len(runs), config=runs[0].config or {})
    for entry in SQLiteStorage.get_logs(project, runs[0].name, run_id=runs[0].id):
        for name, value in entry.items():
            if isinstance(value, dict) and value.get("_type") == "trackio.table":
                if name == "rollouts":
                    found.tables[entry["step"]] = value["_value"]
                else:
                    found.summary += json.dumps(value["_value"])
            elif isinstance(value, int | float) and name not in ("step", "timestamp"):
                found.curves[name].append((entry["step"], value))
    return found


def read_mlflow(folder: Path, run_dir: Path) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("covey")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    found = Found(runs=len(runs), config=runs[0].data.params)
    assert runs[0].info.status == "FINISHED"
    run_id = runs[0].info.run_id
    for name in runs[0].data.metrics:
        found.curves[name] = [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
    artifacts = Path(runs[0].info.artifact_uri.removeprefix("file://"))
    table = json.loads((artifacts / "rollouts.json").read_text())
    for row in table["data"]:
        found.tables.setdefault(row[0], []).append(dict(zip(table["columns"], row, strict=True)))
    found.summary = (artifacts / "summary.json").read_text()
    return found


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}
