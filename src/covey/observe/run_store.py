"""The run folder: what a run was told, what it measured and what its policy did, written before the next step.

runs/arithmetic_grpo-001/
  config.toml                   the resolved config; reads back equal
  metrics.jsonl                 one line a step
  rollouts/step_000012.jsonl    one line a rollout
  checkpoints/                  what `covey train --resume` needs
  model/                        the trained model, as transformers loads it; in control the policy
  summary.json, curve.png       the result

A run that is killed loses no finished step, for what was written is then the operating system's to keep. A power cut
may cost the record of the steps since the last checkpoint (`RunStore.sync` runs before each), which a resumed run does
again anyway. Waiting for the disk at every step would cost more than a step of control takes.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config import ConfigError
from covey.config.origins import CHECKPOINTS_FOLDER, CONFIG_FILE, CRITIC_FOLDER, MODEL_FOLDER  # noqa: F401 -- see above

if TYPE_CHECKING:  # covey.data imports torch, which a mistake in a recipe must not wait for
    from covey.data import Group, Rollout, Start

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
CURVE_FILE = "curve.png"
ROLLOUTS_FOLDER = "rollouts"


class RunStore:
    """Writes a run folder. An `Observer` of the loop."""

    def __init__(self, run_dir: str | Path, *, resume: bool = False) -> None:
        """Create the folder, or with `resume` open one that holds a run.

        Raises:
            ConfigError: if the folder cannot be written, already holds a run, or (with `resume`) holds none.
        """
        self.run_dir = Path(run_dir).expanduser()
        self._unsynced: list[Path] = []
        check_run_dir(run_dir, resume=resume)
        try:
            (self.run_dir / ROLLOUTS_FOLDER).mkdir(parents=True, exist_ok=True)
            with open(self.run_dir / METRICS_FILE, "ab"):
                pass
        except OSError as error:
            raise ConfigError(
                f"cannot write the run folder {run_dir} ({error.strerror}): name another with --run-dir"
            ) from error

    def record(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Append a finished step. Its rollouts are written before its metrics, so a line promises its rollouts."""
        lines = [
            encode(rollout_record(step, group.start, rollout, dropped=group.dropped)) + b"\n"
            for group in groups
            for rollout in group.rollouts
        ]
        path = self.rollouts_path(step)
        path.write_bytes(b"".join(lines))
        self._unsynced.append(path)
        with open(self.run_dir / METRICS_FILE, "ab") as file:
            file.write(encode({"step": step, **metrics}) + b"\n")

    def sync(self) -> None:
        """Bring every recorded step to the disk. To be called before a checkpoint that counts on them."""
        for path in (*self._unsynced, self.run_dir / ROLLOUTS_FOLDER, self.run_dir / METRICS_FILE, self.run_dir):
            if path.exists():  # somebody may have made room
                _sync(path)
        self._unsynced.clear()

    def rewind(self, step: int) -> None:
        """Forget every step after `step`, so that a resumed run writes them anew; those lines may be damaged.

        Raises:
            ConfigError: if a line that is kept cannot be read.
        """
        path = self.run_dir / METRICS_FILE
        lines = path.read_bytes().splitlines()
        kept = [line for line in islice(_parsed(lines, path), step) if line["step"] <= step]  # one line a step, from 1
        write_atomically(path, b"".join(encode(line) + b"\n" for line in kept))
        for rollouts in (self.run_dir / ROLLOUTS_FOLDER).glob("step_*.jsonl"):
            number = re.fullmatch(r"step_(\d+)\.jsonl", rollouts.name)
            if number and int(number[1]) > step:
                rollouts.unlink()

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`, whole or not at all.

        The display and the curve read these keys of it, and others may stand beside them:

            {"world": "language", "run_dir": "runs/arithmetic_grpo-001", "recipe": "arithmetic_grpo", "seed": 0,
             "steps": 60, "seconds": 1310.2, "decisions_sampled": 184320, "peak_memory_bytes": 2417483776,
             "evaluations": [{"max_new_tokens": 12,
                              "before": {"score": 0.09, "low": 0.06, "high": 0.13, "count": 256},
                              "after": {"score": 0.62, "low": 0.56, "high": 0.68, "count": 256}}]}

        The first evaluation is the one at the training's token limit; `covey.observe.statistics.mean_score` makes the
        inner tables. With "world": "control" a score is a mean return, the count is that of the episodes, there is no
        "max_new_tokens", and four more keys stand beside the others:

            {"environment": "CartPole-v1", "environment_steps": 98304, "episodes": 1210, "expected_return": 475.0}

        "expected_return" is null where the recipe names none.
        """
        write_atomically(self.run_dir / SUMMARY_FILE, encode(summary, indent=2) + b"\n")

    def rollouts_path(self, step: int) -> Path:
        """The file of one step's rollouts."""
        return self.run_dir / ROLLOUTS_FOLDER / f"step_{step:06d}.jsonl"


def check_run_dir(run_dir: str | Path, *, resume: bool = False) -> None:
    """Refuse a run folder that `RunStore` could not use, leaving nothing behind.

    Raises:
        ConfigError: if the folder cannot be written, already holds a run, or (with `resume`) holds none.
    """
    folder = Path(run_dir).expanduser()
    if resume and not holds_run(folder):
        raise ConfigError(f"there is no run to resume in {run_dir}: no step is recorded there")
    if not resume and holds_run(folder):
        raise ConfigError(
            f"{run_dir} already holds a run: continue it with covey train --resume {run_dir}, "
            "or name another folder with --run-dir"
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # trying is the only sure way: root may write where it cannot
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write the run folder {run_dir} ({existing}: {error.strerror}): name another with --run-dir"
        ) from error


def holds_run(run_dir: Path) -> bool:
    """True where a run has left something worth keeping. One that stopped before its first step has not."""
    metrics, checkpoints = run_dir / METRICS_FILE, run_dir / CHECKPOINTS_FOLDER
    return (metrics.is_file() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def next_run_dir(recipe_name: str, root: Path = Path("runs")) -> Path:
    """The first unused folder after every `<root>/<recipe>-<number>`: runs/arithmetic_grpo-001."""
    pattern = re.compile(re.escape(recipe_name) + r"-(\d+)")
    matches = (pattern.fullmatch(path.name) for path in (root.iterdir() if root.is_dir() else ()))
    last = max((int(match[1]) for match in matches if match), default=0)
    return root / f"{recipe_name}-{last + 1:03d}"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The recorded steps in order. A last line that was cut by a crash is left out.

    Raises:
        ConfigError: if there is no metrics file, or a line before the last is damaged.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return list(_parsed(lines, path))


def _parsed(lines: list[bytes], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                return
            raise ConfigError(f"{path}, line {number} is damaged: mend or delete it") from error
        yield record


def rollout_record(step: int, start: Start, rollout: Rollout, *, dropped: bool = False) -> dict[str, Any]:
    """One rollout as a line of the rollouts file; `group` is the start's index within the step. No observations.

    "dropped" stands only in the lines of groups that nothing learned from because others were drawn in their place.
    """
    record = {
        "step": step,
        "group": start.index,
        "prompt": start.prompt,
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "score": rollout.score,
        "end": str(rollout.end),
        "decisions": len(rollout.actions),
        "version": rollout.version,
    }
    record |= {"dropped": True} if dropped else {}
    record |= _steps(rollout)
    return record | ({"answer": start.columns["answer"]} if "answer" in start.columns else {})


def _steps(rollout: Rollout) -> dict[str, Any]:
    """The reasoning steps of a completion with what was earned at the end of each; nothing where it has none."""
    if rollout.step_texts is None or rollout.step_ends is None or rollout.step_rewards is None:
        return {}
    earned = [rollout.step_rewards[end] for end in rollout.step_ends]
    return {"steps": [list(step) for step in zip(rollout.step_texts, earned, strict=True)]}


def encode(value: Any, indent: int | None = None) -> bytes:
    """JSON that every reader accepts: UTF-8, NaN and infinity as null; a lone half of a character stays an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError):  # rare, and looking at every value first takes twice as long
        text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Nested values as JSON knows them; what it does not know is written as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):  # NumPy's numbers too
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves the old one or the new one, never half."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    _sync(temporary)
    os.replace(temporary, path)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
