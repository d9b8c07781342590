"""One line for each run: state, steps, result, size and age. `covey runs` prints these lines.

`covey runs prune` removes old checkpoints of finished runs; what `--resume`, `RUN` and `RUN@best` read is kept.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from covey.config.fields import printable
from covey.config.files import faults_of, read_below, read_end, status_below
from covey.config.model_sources import BEST_FILE, CHECKPOINT_NAME, CHECKPOINTS_FOLDER, CONFIG_FILE, MANIFEST_FILE
from covey.tracking.run_folder import (
    METRICS_FILE,
    SUMMARY_FILE,
    FolderLock,
    RunState,
    checkpoint_steps,
    last_change,
    last_step,
    run_state,
)
from covey.tracking.run_reader import RunReader, kind_of_run, number, table, text
from covey.tracking.wording import HELD_OUT_METRICS, LOSS, SCORE_KINDS, ScoreKind, is_above

LAST_BYTES = 1 << 20  # of the metrics file, in which the last evaluation is looked for
UNKNOWN = "-"
STATE_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "crashed": "red"}


@dataclass(frozen=True)
class RunOverview:
    """A run in the list of runs. Values that its files do not tell are None."""

    path: Path
    state: RunState
    recipe: str | None
    algorithm: str | None
    seed: int | None
    step: int  # last recorded one
    steps: int | None  # planned ones
    kind: ScoreKind | None  # of the scores
    before: dict[str, Any] | None  # "score", "low", "high", "count"
    after: dict[str, Any] | None  # of a run that has not ended, the last evaluation during training
    bytes: int  # of all its files
    checkpoint_bytes: int
    began: float  # seconds since the epoch
    changed: float

    @property
    def change(self) -> float | None:
        """Score after minus score before."""
        if self.before is None or self.after is None:
            return None
        return float(self.after["score"] - self.before["score"])

    def as_dict(self) -> dict[str, Any]:
        """The line of `covey runs --json`."""
        return {
            "run": str(self.path),
            "state": str(self.state),
            "recipe": self.recipe,
            "algorithm": self.algorithm,
            "seed": self.seed,
            "step": self.step,
            "steps": self.steps,
            "score_kind": self.kind.name if self.kind else None,
            "before": self.before,
            "after": self.after,
            "bytes": self.bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "began": _timestamp(self.began),
            "changed": _timestamp(self.changed),
        }


def overview(run_dir: Path) -> RunOverview:
    """Read the overview of a run; nothing in its folder is changed."""
    state = run_state(run_dir)
    reader = RunReader(run_dir)
    config, summary, origin = reader.config() or {}, reader.summary() or {}, reader.origin()
    kind = SCORE_KINDS.get(kind_of_run(config or None, summary)[1] or "")
    before, after = _results(run_dir, summary, origin)
    size, checkpoint_size = folder_bytes(run_dir)
    return RunOverview(
        path=run_dir,
        state=state,
        recipe=text(summary.get("recipe")) or text(origin.get("recipe")) or None,
        algorithm=text(summary.get("algorithm")) or text(config.get("algorithm")) or None,
        seed=_whole(config.get("seed", summary.get("seed"))),
        step=last_step(run_dir),
        steps=_whole(config.get("steps")),
        kind=kind,
        before=before,
        after=after,
        bytes=size,
        checkpoint_bytes=checkpoint_size,
        began=_began(run_dir),
        changed=last_change(run_dir),
    )


def folder_bytes(run_dir: Path) -> tuple[int, int]:
    """Bytes of the plain files below a run folder, and of those below its checkpoints. Links are not followed."""
    total = below_checkpoints = 0
    for folder, names, files in os.walk(run_dir):
        names[:] = [name for name in names if not os.path.islink(os.path.join(folder, name))]
        size = sum(_file_bytes(os.path.join(folder, name)) for name in files)
        total += size
        if Path(folder).relative_to(run_dir).parts[:1] == (CHECKPOINTS_FOLDER,):
            below_checkpoints += size
    return total, below_checkpoints


SORT_KEYS: dict[str, Callable[[RunOverview], Any]] = {
    "changed": lambda run: -run.changed,
    "began": lambda run: -run.began,
    "name": lambda run: str(run.path),
    "state": lambda run: list(RunState).index(run.state),
    "step": lambda run: -run.step,
    "score": lambda run: _best_first(run, None if run.after is None else run.after["score"]),
    "change": lambda run: _best_first(run, run.change),
    "size": lambda run: -run.bytes,
}


def overview_table(runs: Sequence[RunOverview], now: float | None = None) -> Table:
    """The table of `covey runs`."""
    now = time.time() if now is None else now
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading, right in (
        ("run", False), ("state", False), ("step", True), ("result", False), ("size", True), ("changed", True),
        ("seed", True), ("algorithm", False),
    ):  # fmt: skip
        shown.add_column(heading, justify="right" if right else "left", no_wrap=True, overflow="fold")
    for run in runs:
        shown.add_row(
            Text(printable(str(run.path))),
            Text(run.state, STATE_STYLES[run.state]),
            f"{run.step:,}/{run.steps:,}" if run.steps else f"{run.step:,}",
            Text(result_text(run), _result_style(run)),
            size_text(run.bytes),
            age_text(now - run.changed),
            UNKNOWN if run.seed is None else str(run.seed),
            Text(printable(run.algorithm or UNKNOWN)),
        )
    return shown


def result_text(run: RunOverview) -> str:
    """'9.0% -> 61.7% (55.6 to 67.5)'; before the end of the run '9.0% -> 45.2% so far'."""
    if run.before is None and run.after is None:
        return UNKNOWN
    kind = run.kind or SCORE_KINDS["score"]
    before = UNKNOWN if run.before is None else kind.write(run.before["score"])
    if run.after is None:
        return f"{before} ->"
    if run.after.get("count") is None:
        return f"{before} -> {kind.write(run.after['score'])} so far"
    after = kind.write(run.after["score"]) if kind is LOSS else kind.write_interval(run.after)
    return f"{before} -> {after}"


def size_text(count: int) -> str:
    """1,288,490,189 as '1.2 GB'."""
    size, units = float(count), ["TB", "GB", "MB", "kB", "B"]
    while size >= 999.5 and len(units) > 1:
        size, _ = size / 1000, units.pop()
    return f"{size:.0f} {units[-1]}" if units[-1] == "B" or size >= 99.5 else f"{size:.1f} {units[-1]}"


def age_text(seconds: float) -> str:
    """10,000 seconds as '2 h'."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def _result_style(run: RunOverview) -> str:
    if run.before is None or run.after is None or run.after.get("low") is None or run.before.get("low") is None:
        return ""
    return "green" if is_above(run.after, run.before) else "red" if is_above(run.before, run.after) else ""


def _results(
    run_dir: Path, summary: Mapping[str, Any], origin: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The evaluations before and after training, at the token limit of the training."""
    first = next(iter(_tables(summary.get("evaluations"))), {})
    before = _estimate(first.get("before")) or _estimate(next(iter(_tables(origin.get("before"))), None))
    after = _estimate(first.get("after"))
    if after is None:
        score = _last_evaluation(run_dir)
        after = None if score is None else {"score": score, "low": None, "high": None, "count": None}
    return before, after


def _last_evaluation(run_dir: Path) -> float | None:
    """The last held-out score or loss that was measured during training."""
    with suppress(OSError):
        for line in reversed(read_end(run_dir, METRICS_FILE, most=LAST_BYTES)[0].split(b"\n")[:-1]):
            with suppress(ValueError, RecursionError):
                for name in HELD_OUT_METRICS:
                    if name.encode() in line and (score := number(table(json.loads(line)).get(name))) is not None:
                        return score
    return None


def _estimate(value: Any) -> dict[str, Any] | None:
    given = table(value)
    if number(given.get("score")) is None or _whole(given.get("count")) is None:
        return None
    low, high = number(given.get("low")), number(given.get("high"))
    known = low is not None and high is not None
    ends = {"low": low if known else None, "high": high if known else None}
    return {"score": number(given["score"]), **ends, "count": given["count"]}


def _tables(value: Any) -> list[dict[str, Any]]:
    return [table(item) for item in value] if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _best_first(run: RunOverview, value: float | None) -> float:
    """The key of an order with the best result first, a low one for losses, and an unknown one last."""
    if value is None:
        return math.inf
    return value if run.kind is LOSS else -value


def _began(run_dir: Path) -> float:
    with suppress(OSError):
        return (run_dir / CONFIG_FILE).stat().st_mtime
    return last_change(run_dir)


def _file_bytes(path: str) -> int:
    with suppress(OSError):
        status = os.lstat(path)
        return status.st_size
    return 0


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


_UNFINISHED = ".unfinished-"  # prefix of folders that an interrupted save or removal leaves


@dataclass(frozen=True)
class Pruning:
    """What can be removed from a run: names of folders among its checkpoints, and their bytes."""

    run_dir: Path
    removed: tuple[str, ...]
    kept: tuple[str, ...]  # with the reason: 'step-00000080 (newest)'
    bytes: int


def plan_pruning(run_dir: Path, keep: int = 1) -> Pruning | None:
    """What can be removed from a run; None if nothing can, or if the run is not finished.

    A link is neither followed nor removed, and a folder with files that covey does not write is kept.

    Args:
        keep: number of complete checkpoints that are kept, the newest; the best one is kept as well.
    """
    folder = run_dir / CHECKPOINTS_FOLDER
    if run_state(run_dir) is not RunState.FINISHED or folder.is_symlink():
        return None
    complete = [step for step in checkpoint_steps(run_dir) if _is_complete(folder / _name(step))]
    if not complete:  # nothing but damaged ones, which may be all that is left of the run
        return None
    newest = complete[-keep:]
    why = {_name(step): "newest" for step in newest}
    if best := _step_in(folder, BEST_FILE, "step"):
        # The evaluation after the last step may be the best one; a run that goes on forgets it.
        if between := _step_in(folder / _name(newest[-1]), "state.json", "progress", "best_step"):
            why.setdefault(_name(between), "best if the run goes on")
        why[_name(best)] = "newest and best" if best in newest else "best"
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    removed = [name for name in names if name not in why and _is_removable(folder / name)]
    if not removed:
        return None
    kept = tuple(f"{name} ({why[name]})" for name in names if name in why)
    return Pruning(run_dir, tuple(removed), kept, sum(folder_bytes(folder / name)[0] for name in removed))


def prune(pruning: Pruning) -> None:
    """Remove what was planned. The run is locked meanwhile.

    Raises:
        ConfigError: if another process writes to the run.
        MachineError: if the files cannot be removed.
    """
    with FolderLock(pruning.run_dir), faults_of(pruning.run_dir / CHECKPOINTS_FOLDER):
        if not (pruning.run_dir / SUMMARY_FILE).is_file():
            return
        folder = os.open(pruning.run_dir / CHECKPOINTS_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for name in pruning.removed:
                doomed = name if name.startswith(_UNFINISHED) else f"{_UNFINISHED}removed-{name}"
                os.rename(name, doomed, src_dir_fd=folder, dst_dir_fd=folder)  # a crash leaves no damaged checkpoint
                shutil.rmtree(doomed, dir_fd=folder)  # follows no link
        finally:
            os.close(folder)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step_in(folder: Path, file: str, *keys: str) -> int:
    """The step under these keys of a JSON file; 0 if it has none."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        step = json.loads(read_below(folder, file))
        for key in keys:
            step = step[key]
        return step if type(step) is int else 0
    return 0


def _is_complete(checkpoint: Path) -> bool:
    """True if all files of a checkpoint have the size that its manifest names."""
    try:
        files = json.loads(read_below(checkpoint, MANIFEST_FILE))["files"]
        return bool(files) and all(_size(checkpoint, name) == of["bytes"] for name, of in files.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _size(checkpoint: Path, name: str) -> int | None:
    status = status_below(checkpoint, name)
    return None if status is None else status.st_size


def _is_removable(folder: Path) -> bool:
    """True for a checkpoint, and for what an interrupted save or removal left."""
    if folder.name.startswith(_UNFINISHED):
        return True
    names = {path.name for path in folder.iterdir()}
    own = {name for name in names if name.endswith((".safetensors", ".json"))}
    return bool(CHECKPOINT_NAME.fullmatch(folder.name)) and names == own
