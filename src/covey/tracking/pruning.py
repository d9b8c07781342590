"""Removes old checkpoints of finished runs. What `--resume`, `RUN` and `RUN@best` read is kept."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from covey.config.files import faults_of, read_below, status_below
from covey.config.model_sources import BEST_FILE, CHECKPOINT_NAME, CHECKPOINTS_FOLDER, MANIFEST_FILE
from covey.tracking.run_folder import FolderLock
from covey.tracking.run_overview import folder_bytes
from covey.tracking.run_state import RunState, checkpoint_steps, run_state
from covey.tracking.run_store import SUMMARY_FILE

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
    best = _best_step(folder)
    newest = complete[-keep:]
    why = {_name(step): "newest" for step in newest} | ({_name(best): "best"} if best else {})
    if best in newest:
        why[_name(best)] = "newest and best"
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


def _best_step(folder: Path) -> int:
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        step = json.loads(read_below(folder, BEST_FILE))["step"]
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
