"""The tracker Weights & Biases: online, or in `trackers/wandb` of the run folder with WANDB_MODE=offline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from covey.config import ConfigError
from covey.tracking.trackers.rows import COLUMNS, Row
from covey.tracking.trackers.tracker import Position, TrackedRun

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
        if os.environ.get("WANDB_MODE", "online") in LOCAL_MODES or os.environ.get("WANDB_API_KEY"):
            return
        import wandb

        if not wandb.login(prompt=False):
            raise ConfigError(
                "trackers: wandb has no API key on this machine: run `wandb login`, or set WANDB_MODE=offline, which "
                "writes into the run folder"
            )

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        """Begin a run, or continue the one with the position's id."""
        import wandb

        folder = None if os.environ.get("WANDB_DIR") else str(run.folder)
        settings = wandb.Settings(
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
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=folder,
            id=position.id if position else wandb.util.generate_id(),
            resume="allow",
            name=run.name,
            group=run.recipe,
            config=dict(run.config),
            reinit="create_new",  # a run that the user's own code has begun stays as it is
            settings=settings,
        )
        if position is None:
            return Position(self._run.id)
        known = self._run.step - 1 if self._run.resumed else position.step  # online, the server knows the last step
        return Position(position.id, max(position.step, known), position.finished)

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        """Log metrics, and the rollouts as a table."""
        table = {"rollouts": self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rollouts])}
        self._run.log({**metrics, **(table if rollouts else {})}, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Add the summary to the run's, and upload for at most FINISH_SECONDS; the rest stays in the folder."""
        if summary is not None:
            self._run.summary.update({"covey": dict(summary)})
        self._run.finish(exit_code=0)
