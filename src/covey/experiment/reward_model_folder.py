"""The run folder of the training of a reward model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.config.faults import faults_of, path_error
from covey.config.fields import command
from covey.config.files import sync
from covey.config.model_sources import CHECKPOINTS_FOLDER, MODEL_FOLDER
from covey.config.reward_models import TRAINING_FILE
from covey.runtime.checkpoint import CheckpointFolder
from covey.tracking.run_folder import LOCK_FILE, METRICS_FILE, FolderLock, write_atomically, write_folders
from covey.tracking.run_store import SUMMARY_FILE, encode

RELIABILITY_FILE = "reliability.png"
KEPT_CHECKPOINTS = 2


def check_training_folder(folder: Path, *, resume: bool = False) -> None:
    """Refuse a folder that a training cannot use.

    Raises:
        ConfigError: if it is not empty, or with `resume` has no training, or a finished one.
    """
    holds_training = (folder / TRAINING_FILE).is_file()
    if resume:
        if not holds_training:
            raise ConfigError(
                f"there is no training of a reward model to resume in {folder}: it has no {TRAINING_FILE}"
            )
        if (folder / SUMMARY_FILE).is_file():
            raise ConfigError(f"the training of the reward model in {folder} is finished: its model is in model/")
        return
    if holds_training:
        raise ConfigError(
            f"{folder} already holds the training of a reward model: continue it with "
            f"{command('reward-model', 'train', '--resume', folder)}, or name another folder with --run-dir"
        )
    try:
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK_FILE) if folder.exists() else []
    except OSError as error:
        raise path_error(error, f"cannot use the folder {folder}, name another with --run-dir") from error
    if foreign:
        raise ConfigError(f"{folder} is not empty (it has {foreign[0]}): name a new folder with --run-dir")


class RewardModelFolder:
    """Writes the run folder of a training, which it locks until its end. A context manager."""

    def __init__(self, run_dir: Path, *, resume: bool = False) -> None:
        """Create the folder, or with `resume` open that of a stopped training.

        Raises:
            ConfigError: as `check_training_folder`, and if another process writes into it.
            MachineError: if it cannot be written.
        """
        check_training_folder(run_dir, resume=resume)
        self.run_dir = run_dir
        self.notes: list[str] = []  # for the user, before the training
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise path_error(error, f"cannot use the folder {run_dir}, name another with --run-dir") from error
        self._lock = FolderLock(run_dir)
        self.checkpoints = CheckpointFolder(
            run_dir / CHECKPOINTS_FOLDER, KEPT_CHECKPOINTS, before_save=lambda: self._flush()
        )

    def __enter__(self) -> RewardModelFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if {entry.name for entry in self.run_dir.iterdir()} == {LOCK_FILE}:  # it ended before it began
            with suppress(OSError):
                (self.run_dir / LOCK_FILE).unlink()
                self.run_dir.rmdir()
        self._lock.release()

    def begin(self, record: dict[str, Any]) -> None:
        """Write how the training was called."""
        write_atomically(self.run_dir / TRAINING_FILE, encode(record, indent=2))

    def record(self, metrics: dict[str, Any]) -> None:
        """Append a line to the metrics."""
        self._lock.check()
        path = self.run_dir / METRICS_FILE
        with faults_of(path), open(path, "ab") as file:
            file.write(encode(metrics) + b"\n")

    def rewind(self, step: int) -> None:
        """Remove the records of every step after `step`, and a line that a crash cut."""
        path = self.run_dir / METRICS_FILE
        kept = []
        with faults_of(path):
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step and line.endswith(b"\n"):
                    kept.append(line)
        write_atomically(path, b"".join(kept))

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> None:
        self._lock.check()
        self.checkpoints.save(step, state)

    def write_model(self, save: Callable[[Path], None]) -> None:
        """Write the model, as a whole or not at all."""

        def write(draft: Path) -> None:
            (draft / MODEL_FOLDER).mkdir()
            save(draft / MODEL_FOLDER)

        write_folders(self.run_dir, write)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the result; a folder with it is finished, so that its checkpoints are of no use and removed."""
        write_atomically(self.run_dir / SUMMARY_FILE, encode(summary, indent=2))
        self.checkpoints.remove()

    def _flush(self) -> None:
        """fsync the metrics, which a checkpoint relies on."""
        path = self.run_dir / METRICS_FILE
        if path.exists():
            with faults_of(path):
                sync(path)
