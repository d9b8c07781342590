"""The tracker Weights & Biases: online, or in `trackers/wandb` of the run folder with WANDB_MODE=offline."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.tracking.trackers.rows import COLUMNS, Row
from covey.tracking.trackers.tracker import NEW, Position, TrackedRun

PROJECT = "covey"  # unless WANDB_PROJECT names another
INIT_SECONDS, FINISH_SECONDS = 60.0, 45.0
LOCAL_MODES = ("offline", "disabled", "dryrun")


class WandbTracker:
    """Logs to a run of Weights & Biases; implements `Tracker`.

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
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(folder),
            id=own,
            resume=None if self._is_local() else "allow",
            name=run.name,
            group=run.recipe,
            config=dict(run.config),
            reinit="create_new",  # a run that the user's own code has begun stays as it is
            settings=_settings(wandb),
        )
        if position is None or not self._run.resumed:
            return Position(own)
        return replace(position, step=self._run.step - 1 if self._run.step else NEW)

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Log metrics, and the rollouts as a table."""
        table = {}
        if rollouts:
            table = {"rollouts": self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rollouts])}
        self._run.log({**metrics, **table}, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Add the summary to the run's, and upload for at most FINISH_SECONDS; the rest stays in the folder."""
        if summary is not None:
            self._run.summary.update({"covey": dict(summary)})
        self._run.finish(exit_code=0)


def _settings(wandb: Any) -> Any:
    """Settings without output to the terminal, and without wandb's records of code, output and machine."""
    return wandb.Settings(
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
    )
