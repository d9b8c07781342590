"""The run folder: what a run was told, what it measured and what its policy did, written before the next step.

runs/arithmetic_grpo-001/
  config.toml                   the resolved config; reads back equal
  metrics.jsonl                 one line a step
  rollouts/step_000012.jsonl    one line a rollout: prompt, columns of the data, completion, rewards (`rollout_record`)
  held_out/step_000000.jsonl    one line a held-out answer (`answer_record`); of a language model
  checkpoints/                  what `covey train --resume` needs
  model/                        the trained model, as transformers loads it; in control the policy
  summary.json, curve.png       the result
  covey.lock                    the process that writes here has it locked, and it names that process

A run that is killed loses no finished step, for what was written is then the operating system's to keep. A power cut
may cost the record of the steps since the last checkpoint (`RunStore.sync` runs before each), which a resumed run does
again anyway. Waiting for the disk at every step would cost more than a step of control takes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config import ConfigError
from covey.config.faults import faults_of, told
from covey.config.files import sync
from covey.config.model_sources import CHECKPOINTS_FOLDER, CONFIG_FILE, CRITIC_FOLDER, MODEL_FOLDER  # noqa: F401 -- see above
from covey.tracking.run_folder import (
    HELD_OUT_FOLDER,
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    discard_unstarted,
    open_run_dir,
    write_atomically,
)

if TYPE_CHECKING:  # covey.data imports torch, which a mistake in a recipe must not wait for
    from covey.data import Group, Rollout, Start

SUMMARY_FILE = "summary.json"
CURVE_FILE = "curve.png"
_LAST_BYTES = 1 << 16  # of a file of rollouts: as a rule more than its last line


class RunStore:
    """Writes a run folder, which it locks until `close`. An `Observer` of the loop, and a context manager."""

    def __init__(self, run_dir: str | Path, *, resume: bool = False) -> None:
        """Create the folder, or with `resume` open one that holds a run.

        Raises:
            ConfigError: if the folder is no place for a run, already holds one, is being written by another process,
                or (with `resume`) holds none.
            MachineError: if it cannot be written.
        """
        self._lock = open_run_dir(run_dir, resume=resume)
        self.run_dir = self._lock.folder
        self.began = resume  # whether a step has been recorded
        self._unsynced: list[Path] = [self.run_dir / CONFIG_FILE]
        with faults_of(self.run_dir):
            (self.run_dir / ROLLOUTS_FOLDER).mkdir(exist_ok=True)
            with open(self.run_dir / METRICS_FILE, "ab"):
                pass

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes write here. The folder of a run that ended before its first step is removed."""
        if not self.began:
            with suppress(OSError):
                discard_unstarted(self.run_dir)
        self._lock.release()

    def check(self) -> None:
        """See that the folder is still there, and still the same one.

        Raises:
            MachineError: if it was deleted, moved or replaced.
        """
        self._lock.check()

    def record(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Append a finished step. Its rollouts are written before its metrics, so a line promises its rollouts."""
        lines = [
            encode(rollout_record(step, group.start, rollout, dropped=group.dropped)) + b"\n"
            for group in groups
            for rollout in group.rollouts
        ]
        self.check()
        path = self.rollouts_path(step)
        with faults_of(path):
            path.write_bytes(b"".join(lines))
        self._unsynced.append(path)
        with faults_of(self.run_dir / METRICS_FILE), open(self.run_dir / METRICS_FILE, "ab") as file:
            file.write(encode({"step": step, **metrics}) + b"\n")
        self.began = True

    def record_evaluation(self, step: int, answers: Sequence[dict[str, Any]]) -> None:
        """Write the held-out answers of the weights after `step` steps (0 is before training), whole or not at all.

        The same weights may be evaluated again, at more token limits: the file then holds what it held, and more.
        """
        self.check()
        path = self.held_out_path(step)
        with faults_of(path):
            path.parent.mkdir(exist_ok=True)
        write_records(path, answers)

    def sync(self) -> None:
        """Bring every recorded step to the disk. To be called before a checkpoint that counts on them."""
        self.check()
        for path in (*self._unsynced, self.run_dir / ROLLOUTS_FOLDER, self.run_dir / METRICS_FILE, self.run_dir):
            if path.exists():  # somebody may have made room
                with faults_of(path):
                    sync(path)
        self._unsynced.clear()

    def rewind(self, step: int) -> list[str]:
        """Forget every step after `step`, so that a resumed run writes them anew.

        Training reads nothing of what was recorded, so a record that is lost or damaged does not stop it. A metrics
        file with a damaged line is kept beside the new one.

        Returns:
            one line for each kind of record that is lost.

        Raises:
            MachineError: if the files cannot be read or written.
        """
        path = self.run_dir / METRICS_FILE
        with faults_of(path):
            lines = path.read_bytes().splitlines()
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
        for folder in (HELD_OUT_FOLDER, ROLLOUTS_FOLDER):
            with faults_of(self.run_dir / folder):
                for file in (self.run_dir / folder).glob("step_*.jsonl"):
                    number = re.fullmatch(r"step_(\d+)\.jsonl", file.name)
                    if number and int(number[1]) > step and not file.is_dir():
                        file.unlink()
        with faults_of(self.run_dir / ROLLOUTS_FOLDER):
            unread = [number for number in range(1, step + 1) if not _has_rollouts(self.rollouts_path(number), number)]
        if unread:
            notes.append(f"{ROLLOUTS_FOLDER}/ has lost those of {_steps_in_words(unread)}; training does not need them")
        return notes

    def last_recorded(self) -> int:
        """The last step in the metrics file, damaged lines aside; 0 before the first.

        Raises:
            MachineError: if the file cannot be read.
        """
        path = self.run_dir / METRICS_FILE
        with faults_of(path):
            records = map(_read_record, path.read_bytes().splitlines())
        return max((record["step"] for record in records if record is not None), default=0)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`, whole or not at all.

        The display and the curve read these keys of it, and others may stand beside them:

            {"world": "language", "score_kind": "accuracy", "run_dir": "runs/arithmetic_grpo-001",
             "recipe": "arithmetic_grpo", "seed": 0, "steps": 60, "seconds": 1310.2, "decisions_sampled": 184320,
             "peak_memory_bytes": 2417483776,
             "evaluations": [{"max_new_tokens": 12,
                              "before": {"score": 0.09, "low": 0.06, "high": 0.13, "count": 256},
                              "after": {"score": 0.62, "low": 0.56, "high": 0.68, "count": 256}}]}

        The first evaluation is the one at the training's token limit. "score_kind" is a key of
        `covey.tracking.score_kinds.SCORE_KINDS`, whose `estimate` makes the inner tables: "accuracy" where the reward
        says right or wrong by its kind, else "score". "low" and "high" are null where a score of one problem has no
        interval. With "world": "control" a score is a mean return ("score_kind": "return"), the count is that of the
        episodes, there is no "max_new_tokens", and four more keys stand beside the others:

            {"environment": "CartPole-v1", "environment_steps": 98304, "episodes": 1210, "expected_return": 475.0}

        "expected_return" is null where the recipe names none.
        """
        write_atomically(self.run_dir / SUMMARY_FILE, encode(summary, indent=2) + b"\n")

    def rollouts_path(self, step: int) -> Path:
        """The file of one step's rollouts."""
        return self.run_dir / ROLLOUTS_FOLDER / f"step_{step:06d}.jsonl"

    def held_out_path(self, step: int) -> Path:
        """The file of the held-out answers after a step; step 0 is before training."""
        return self.run_dir / HELD_OUT_FOLDER / f"step_{step:06d}.jsonl"


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a JSONL file, whole or not at all."""
    write_atomically(path, b"".join(encode(record) + b"\n" for record in records))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The recorded steps in order. A last line that was cut by a crash is left out.

    Raises:
        ConfigError: if there is no metrics file, or a line before the last is damaged.
        MachineError: if the file cannot be read.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise told(error, f"cannot read {path}", path) from error
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
    """A line of the metrics file: a step and its numbers. None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or record["step"] < 1:
        return None
    return record if all(value is None or type(value) in (int, float) for value in record.values()) else None


def _has_rollouts(path: Path, step: int) -> bool:
    """Whether a step's file of rollouts is there and whole, as far as its last line and its first bytes show."""
    try:
        with open(path, "rb") as file:
            first = file.readline()
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            tail = file.read()
        last = tail.rstrip(b"\n").rpartition(b"\n")[2] if len(tail) < _LAST_BYTES else b"{}"
        return tail.endswith(b"\n") and json.loads(first)["step"] == step and isinstance(json.loads(last), dict)
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _steps_in_words(steps: Sequence[int]) -> str:
    """[2] as 'step 2', [2, 5, 6, 7] as 'steps 2 and 5 to 7'; the first few of many."""
    ends = [step for step in steps if step + 1 not in steps]
    begins = [step for step in steps if step - 1 not in steps]
    ranges = [str(a) if a == b else f"{a} to {b}" for a, b in zip(begins, ends, strict=True)]
    shown = ranges if len(ranges) <= 5 else [*ranges[:4], f"{len(ranges) - 4} other ranges"]
    words = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"step{'s' if len(steps) > 1 else ''} {words}"


def rollout_record(step: int, start: Start, rollout: Rollout, *, dropped: bool = False) -> dict[str, Any]:
    """One rollout as a line of the rollouts file; `group` is the start's index within the step. No observations.

    "decisions" counts the actions that the policy decided. "undecided" stands only in the lines of rollouts that have
    others, such as the tokens of a tool's output: their positions after the prompt as [first, after the last] pairs.

    >>> {"step": 3, "group": 0, ..., "decisions": 12, "undecided": [[5, 9], [14, 20]], "version": 2}

    "dropped" stands only in the lines of groups that nothing learned from because others were drawn in their place.
    """
    record = {
        "step": step,
        "group": start.index,
        **_attempt(start, rollout),
        "end": str(rollout.end),
        "decisions": rollout.decisions,
        **_undecided(rollout),
        "version": rollout.version,
    }
    record |= {"dropped": True} if dropped else {}
    return record | _steps(rollout)


def answer_record(step: int, max_new_tokens: int, start: Start, rollout: Rollout) -> dict[str, Any]:
    """A held-out answer as a line of its file; `problem` is the start's index among the held-out problems.

    >>> {"step": 20, "max_new_tokens": 64, "problem": 0, "prompt": "2+2=", "columns": {"answer": "4"}, "text": "5",
    ...  "reward": 0.0, "reward_parts": {"numeric": 0.0}, "score": 0.0, "tokens": 2, "truncated": False}

    "score" is what the evaluation averages, "reward" the weighted sum of "reward_parts"; null: not graded. "truncated"
    says that the token limit cut the answer. "tokens" counts those that the model sampled; "undecided" is as in
    `rollout_record`.
    """
    return {
        "step": step,
        "max_new_tokens": max_new_tokens,
        "problem": start.index,
        **_attempt(start, rollout),
        "tokens": rollout.decisions,
        **_undecided(rollout),
        "truncated": rollout.end.is_limit,
    } | _steps(rollout)


def _attempt(start: Start, rollout: Rollout) -> dict[str, Any]:
    """The fields that rollouts and held-out answers share: the prompt with its columns, the completion, the rewards."""
    return {
        "prompt": start.prompt,
        "columns": dict(start.columns),
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "score": rollout.score,
        **({"extra": rollout.extras} if rollout.extras else {}),
    }


def _undecided(rollout: Rollout) -> dict[str, Any]:
    """Stretches of actions that the policy did not decide, as [first, after the last]; nothing if it decided all."""
    if rollout.decided is None:
        return {}
    known = [True, *map(bool, rollout.decided), True]
    edges = [place for place, (before, now) in enumerate(pairwise(known)) if before != now]
    spans = [list(span) for span in zip(edges[::2], edges[1::2], strict=True)]
    return {"undecided": spans} if spans else {}


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
