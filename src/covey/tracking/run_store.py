"""Writes the run folder: config, metrics and rollouts of a run, each step before the next one begins.

runs/arithmetic_grpo-001/
  config.toml                   the resolved config; reads back equal
  metrics.jsonl                 one line per step
  rollouts/step_000012.jsonl    one line per rollout: prompt, completion, rewards, advantage (`rollout_record`)
  held_out/step_000000.jsonl    one line per held-out answer (`answer_record`); language models only
  checkpoints/                  for `covey train --resume`
  trackers/                     records of experiment trackers: their runs' ids, and files of theirs
  model/                        the trained model in Hugging Face's layout; in control the policy
  summary.json, curve.png       the result
  stopped.json                  instead of summary.json, the result so far of a run that was stopped (`write_stopped`)
  covey.lock                    locked by the process that writes here; holds its process id

A killed run loses no finished step, because the operating system keeps the written data. A power cut may lose the
records of the steps since the last checkpoint (`RunStore.sync` runs before each); a resumed run repeats these steps. An
fsync at every step would take longer than a step of control.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config import ConfigError
from covey.config.files import LARGEST_RECORDS, append_below, faults_of, open_below, path_error, read_below, sync
from covey.config.model_sources import (  # noqa: F401 -- see above
    ADAPTER_FOLDER,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    CRITIC_FOLDER,
    MODEL_FOLDER,
    REWARD_MODEL_FOLDER,
)
from covey.tracking.records import encode, rollout_record
from covey.tracking.repeated_steps import Digests, digests
from covey.tracking.run_folder import (
    HELD_OUT_FOLDER,
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    discard_unstarted,
    open_run_dir,
    write_atomically,
)

if TYPE_CHECKING:  # covey.data imports torch, and a mistake in a recipe is reported before that
    from covey.data import StepRecord

SUMMARY_FILE = "summary.json"
STOPPED_FILE = "stopped.json"  # like the summary, of a run that was stopped before its end
CURVE_FILE = "curve.png"
ITERATIONS_FILE = "iterations.jsonl"  # of an iterative run: its trainings of the reward model
_LAST_BYTES = 1 << 16  # read from the end of a file of rollouts: usually more than its last line


class RunStore:
    """Writes a run folder, which it locks until `close`. An `Observer` of the loop, and a context manager."""

    def __init__(self, run_dir: str | Path, *, resume: bool = False, copy_of: Path | None = None) -> None:
        """Create the folder, or with `resume` open the folder of a run.

        Args:
            run_dir: the folder.
            resume: it is that of a run.
            copy_of: the run folder, if this one is the temporary folder of a rank other than 0, which keeps no records.

        Raises:
            ConfigError: if the folder cannot hold a run, already holds one, is being written by another process, or
                (with `resume`) holds none.
            MachineError: if it cannot be written.
        """
        self._lock = open_run_dir(run_dir, resume=resume)
        self.run_dir = self._lock.folder
        self.shared_dir = copy_of or self.run_dir  # of the run, with its checkpoints
        self.began = resume  # True if a step has been recorded
        self.removed: dict[int, Digests] = {}  # step -> of the rollouts that `rewind` has removed
        self._unsynced: list[Path] = [self.run_dir / CONFIG_FILE]
        with faults_of(self.run_dir):
            (self.run_dir / ROLLOUTS_FOLDER).mkdir(exist_ok=True)
            with append_below(self.run_dir, METRICS_FILE):
                pass

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. The folder of a run that ended before its first step is removed."""
        if not self.began:
            with suppress(OSError):
                discard_unstarted(self.run_dir)
        self._lock.release()

    def check(self) -> None:
        """Check that the folder still exists and is the same one.

        Raises:
            MachineError: if it was deleted, moved or replaced.
        """
        self._lock.check()

    def record(self, record: StepRecord) -> None:
        """Append a finished step. Its rollouts are written before its metrics, so a line implies its rollouts."""
        self.check()
        if record.groups:
            path = self.rollouts_path(record.step)
            with faults_of(path), open(path, "wb") as file:
                for group, rollout, credit in record.rollouts():
                    file.write(encode(rollout_record(record.step, group, rollout, credit)) + b"\n")
            self._unsynced.append(path)
        self.record_metrics(record.step, record.metrics)

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a finished step."""
        self.check()
        with faults_of(self.run_dir / METRICS_FILE), append_below(self.run_dir, METRICS_FILE) as file:
            file.write(encode({"step": step, **metrics}) + b"\n")
        self.began = True

    def record_evaluation(self, step: int, answers: Sequence[dict[str, Any]]) -> None:
        """Write the held-out answers of the weights after `step` steps (0 is before training), atomically.

        If the same weights are evaluated again at more token limits, the answers are added to the file.
        """
        self.check()
        path = self.held_out_path(step)
        with faults_of(path):
            path.parent.mkdir(exist_ok=True)
        write_records(path, answers)

    def sync(self) -> None:
        """fsync every recorded step. Call it before a checkpoint, which relies on these records."""
        self.check()
        for path in (*self._unsynced, self.run_dir / ROLLOUTS_FOLDER, self.run_dir / METRICS_FILE, self.run_dir):
            if path.exists():  # the user may have deleted it to free space
                with faults_of(path):
                    sync(path)
        self._unsynced.clear()

    def rewind(self, step: int, *, rollouts: bool = True) -> list[str]:
        """Remove the records of every step after `step`, which a resumed run writes again, and what was left by a stop.

        Training does not read these records, so a lost or damaged one is not an error. A metrics file with a damaged
        line is kept beside the new one.

        Args:
            step: the last one that is kept.
            rollouts: its steps have rollouts; those of a supervised training have none.

        Returns:
            One line for each kind of record that is lost.

        Raises:
            MachineError: if the files cannot be read or written.
        """
        last = self.last_recorded()
        notes = self._rewind_metrics(step)
        for folder in (HELD_OUT_FOLDER, ROLLOUTS_FOLDER):
            with faults_of(self.run_dir / folder):
                for file in (self.run_dir / folder).glob("step_*.jsonl"):
                    number = re.fullmatch(r"step_(\d+)\.jsonl", file.name)
                    if number and int(number[1]) > step and not file.is_dir():
                        if folder == ROLLOUTS_FOLDER and int(number[1]) <= last:  # else it may be incomplete
                            self.removed[int(number[1])] = digests(file)
                        file.unlink()
        with faults_of(self.run_dir / ROLLOUTS_FOLDER):
            steps = range(1, step + 1) if rollouts else ()
            unread = [number for number in steps if not _has_rollouts(self.rollouts_path(number), number)]
        if unread:
            notes.append(f"{ROLLOUTS_FOLDER}/ has lost those of {_steps_in_words(unread)}; training does not need them")
        return notes

    def _rewind_metrics(self, step: int) -> list[str]:
        self._forget_stop()
        path = self.run_dir / METRICS_FILE
        with faults_of(path):
            lines = read_below(self.run_dir, METRICS_FILE, most=LARGEST_RECORDS).splitlines()
        records = [record for record in map(_read_record, lines) if record is not None]
        kept = {record["step"]: record for record in records if 1 <= record["step"] <= step}
        lost = sorted(set(range(1, step + 1)) - kept.keys())
        notes = []
        if lost:
            notes.append(f"{METRICS_FILE} has lost the numbers of {_steps_in_words(lost)}; training does not need them")
        if lost and len(records) < len(lines):
            write_atomically(path.with_name(f"{METRICS_FILE}.damaged"), b"\n".join(lines) + b"\n")
            notes[-1] += f" (the damaged file is kept as {METRICS_FILE}.damaged)"
        write_records(path, [kept[number] for number in sorted(kept)])
        return notes

    def last_recorded(self) -> int:
        """The last step in the metrics file, without damaged lines; 0 before the first.

        Raises:
            MachineError: if the file cannot be read.
        """
        path = self.run_dir / METRICS_FILE
        with faults_of(path):
            lines = read_below(self.run_dir, METRICS_FILE, most=LARGEST_RECORDS).splitlines()
        return max((record["step"] for record in map(_read_record, lines) if record is not None), default=0)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json` atomically.

        The display and the curve read these keys of it; it may have others:

            {"domain": "language", "score_kind": "accuracy", "run_dir": "runs/arithmetic_grpo-001",
             "recipe": "arithmetic_grpo", "seed": 0, "steps": 60, "seconds": 1310.2, "decisions_sampled": 184320,
             "peak_memory_bytes": 2417483776,
             "evaluations": [{"max_new_tokens": 12,
                              "before": {"score": 0.09, "low": 0.06, "high": 0.13, "count": 256},
                              "after": {"score": 0.62, "low": 0.56, "high": 0.68, "count": 256}}],
             "findings": [{"check": "truncation", "severity": "problem", "first_step": 20, "last_step": 60,
                           "remedy": "Try sampling.max_new_tokens = 16 (now 8)"}]}

        The first evaluation is the one at the training's token limit. "score_kind" is a key of
        `covey.tracking.score_kinds.SCORE_KINDS`, whose `estimate` computes the inner tables: "accuracy" if the reward
        is always right (1) or wrong (0), else "score". "low" and "high" are null for the score of a single problem,
        which has no interval. With "domain": "control" a score is a mean return ("score_kind": "return"), the count is
        that of the episodes, there is no "max_new_tokens", and there are four more keys:

            {"environment": "CartPole-v1", "environment_steps": 98304, "episodes": 1210, "expected_return": 475.0}

        "expected_return" is null if the recipe has none.
        """
        write_atomically(self.run_dir / SUMMARY_FILE, encode(summary, indent=2) + b"\n")

    def write_stopped(self, summary: dict[str, Any]) -> None:
        """Write `stopped.json` atomically: {"state": "stopped", "step": 31} and the keys of the summary that are known.

        Its evaluations have no "after". `rewind` removes it.
        """
        write_atomically(self.run_dir / STOPPED_FILE, encode(summary, indent=2) + b"\n")

    def finished(self) -> bool:
        """True if the run has a summary."""
        return (self.run_dir / SUMMARY_FILE).is_file()

    def _forget_stop(self) -> None:
        """Remove what a stopped run has left: stopped.json, and the weights unless they are those of a finished run."""
        path = self.run_dir / STOPPED_FILE
        with faults_of(path):
            if not path.is_file():
                return
            for name in () if self.finished() else (MODEL_FOLDER, ADAPTER_FOLDER, CRITIC_FOLDER, REWARD_MODEL_FOLDER):
                if (self.run_dir / name).is_dir():
                    shutil.rmtree(self.run_dir / name)
            path.unlink()

    def rollouts_path(self, step: int) -> Path:
        """The file of one step's rollouts."""
        return self.run_dir / ROLLOUTS_FOLDER / f"step_{step:06d}.jsonl"

    def held_out_path(self, step: int) -> Path:
        """The file of the held-out answers after a step; step 0 is before training."""
        return self.run_dir / HELD_OUT_FOLDER / f"step_{step:06d}.jsonl"


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a JSONL file atomically."""
    write_atomically(path, b"".join(encode(record) + b"\n" for record in records))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the recorded steps in order, without a last line that a crash truncated.

    Raises:
        ConfigError: if there is no metrics file, or a line before the last is damaged.
        MachineError: if the file cannot be read.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        lines = read_below(path.parent, path.name, most=LARGEST_RECORDS).splitlines()
    except OSError as error:
        raise path_error(error, f"cannot read {path}", path) from error
    return list(_parsed(lines, path))


def _parsed(lines: list[bytes], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        record = _read_record(line)
        if record is None:
            if number == len(lines):
                return
            raise ConfigError(f"{path}, line {number} is damaged: mend or delete it")
        yield record


def _read_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the metrics file: a step and its numbers. None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or record["step"] < 1:
        return None
    return record if all(value is None or type(value) in (int, float) for value in record.values()) else None


def _has_rollouts(path: Path, step: int) -> bool:
    """True if a step's file of rollouts exists and is complete, judging by its last line and its first bytes."""
    try:
        with open_below(path.parent, path.name) as file:
            first = file.readline()
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            tail = file.read()
        last = tail.rstrip(b"\n").rpartition(b"\n")[2] if len(tail) < _LAST_BYTES else b"{}"
        return tail.endswith(b"\n") and json.loads(first)["step"] == step and isinstance(json.loads(last), dict)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _steps_in_words(steps: Sequence[int]) -> str:
    """[2] as 'step 2', [2, 5, 6, 7] as 'steps 2 and 5 to 7'; the first few of many."""
    ends = [step for step in steps if step + 1 not in steps]
    begins = [step for step in steps if step - 1 not in steps]
    ranges = [str(a) if a == b else f"{a} to {b}" for a, b in zip(begins, ends, strict=True)]
    shown = ranges if len(ranges) <= 5 else [*ranges[:4], f"{len(ranges) - 4} other ranges"]
    words = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"step{'s' if len(steps) > 1 else ''} {words}"
