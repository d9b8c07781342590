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
import math
import os
import re
import shutil
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from covey.config import ConfigError
from covey.config.files import LARGEST_RECORDS, append_below, faults_of, open_below, path_error, read_below, sync
from covey.config.model_sources import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    CRITIC_FOLDER,
    MODEL_FOLDER,
    REWARD_MODEL_FOLDER,
)
from covey.tracking.run_folder import (
    HELD_OUT_FOLDER,
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    STOPPED_FILE,
    SUMMARY_FILE,
    discard_unstarted,
    open_run_dir,
    write_atomically,
)

if TYPE_CHECKING:  # covey.data imports torch, and a mistake in a recipe is reported before that
    from covey.data import Group, Rollout, RolloutCredit, Start, StepRecord

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
        self.removed_metrics: dict[int, dict[str, Any]] = {}  # step -> those that it has removed
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
        lines, records = self._recorded()
        self.removed_metrics = {record["step"]: record for record in records if record["step"] > step}
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
        return max((record["step"] for record in self._recorded()[1]), default=0)

    def _recorded(self) -> tuple[list[bytes], list[dict[str, Any]]]:
        """The lines of the metrics file, and the records of those that are not damaged."""
        with faults_of(self.run_dir / METRICS_FILE):
            lines = read_below(self.run_dir, METRICS_FILE, most=LARGEST_RECORDS).splitlines()
        return lines, [record for record in map(parse_metrics, lines) if record is not None]

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
        `covey.tracking.wording.SCORE_KINDS`, whose `estimate` computes the inner tables: "accuracy" if the reward
        is always right (1) or wrong (0), else "score". "low" and "high" are null for the score of a single problem,
        which has no interval. With "domain": "control" a score is a mean return ("score_kind": "return"), the count is
        that of the episodes, there is no "max_new_tokens", and there are four more keys:

            {"environment": "CartPole-v1", "environment_steps": 98304, "episodes": 1210, "expected_return": 475.0}

        "expected_return" is null if the recipe has none. Of a training on examples ("score_kind": "loss") the score
        is the held-out loss, without an interval, and "measured" has all held-out measures.
        """
        write_atomically(self.run_dir / SUMMARY_FILE, encode(summary, indent=2) + b"\n")

    def write_stopped(self, summary: dict[str, Any]) -> None:
        """Write `stopped.json` atomically: {"state": "stopped", "step": 31} and the keys of the summary that are known.

        Its evaluations have no "after". `rewind` removes it.
        """
        write_atomically(self.run_dir / STOPPED_FILE, encode(summary, indent=2) + b"\n")

    def finished(self) -> bool:
        """True if the run has a summary."""
        return (self.shared_dir / SUMMARY_FILE).is_file()

    def reopen(self, step: int) -> None:
        """Make a finished run one that was stopped after its last step, so that it can go on."""
        path = self.run_dir / SUMMARY_FILE
        with faults_of(path), suppress(ValueError, TypeError):
            self.write_stopped(json.loads(read_below(self.run_dir, SUMMARY_FILE)) | {"state": "stopped", "step": step})
        with faults_of(path):
            path.unlink()

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
    records = [parse_metrics(line) for line in lines]
    if records and records[-1] is None:
        records.pop()
    if None in records:
        raise ConfigError(f"{path}, line {records.index(None) + 1} is damaged: mend or delete it")
    return [record for record in records if record is not None]


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """A line of `metrics.jsonl`: "step" and numbers that fit into a float, or None; None if it is damaged."""
    try:
        record: dict[str, Any] = _object_of(line)
        numbers = [value for value in record.values() if value is not None]
        array("d", numbers)
        kinds_fit = type(record["step"]) is int and {*map(type, numbers)} <= {int, float}
        return record if kinds_fit and 1 <= record["step"] < 1 << 53 else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _object_of(line: bytes) -> Any:
    try:
        return orjson.loads(line)  # five times as fast
    except orjson.JSONDecodeError:
        return json.loads(str(line, "utf-8"))  # numbers that are not finite: JSON has none


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


NOT_COMPARED = {"columns", "extra"}  # may have objects or times of the user's; training reads neither
Digests = dict[str, str]  # key of a line -> checksum of its values in all lines


def digests(path: Path) -> Digests:
    """Checksums of a file of rollouts, one for each key of its lines; {} if it is missing or damaged."""
    found: dict[str, list[tuple[int, str]]] = {}
    try:
        with open_below(path.parent, path.name) as file:
            for number, line in enumerate(file):
                for key, value in json.loads(line.decode("utf-8", "surrogateescape")).items():
                    if key not in NOT_COMPARED:
                        found.setdefault(key, []).append((number, json.dumps(value)))
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {key: sha256(repr(values).encode()).hexdigest() for key, values in found.items()}


class RepeatedSteps:
    """An observer that says so once if a step differs from its record before the resume."""

    def __init__(
        self, before: Mapping[int, Digests], rollouts_path: Callable[[int], Path], note: Callable[[str], None]
    ) -> None:
        """
        Args:
            before: the digests of the steps' former records.
            rollouts_path: the file of a step's rollouts.
            note: shows a line to the user.
        """
        self._before, self._path, self._note = dict(before), rollouts_path, note

    def record(self, step: StepRecord) -> None:
        """Compare a step, which is recorded already."""
        before = self._before.pop(step.step, {})
        if not before:
            return
        now = digests(self._path(step.step))
        different = [key for key in before | now if before.get(key) != now.get(key)]
        if different:
            self._before.clear()  # later steps differ because this one does
            self._note(
                f"step {step.step} was sampled again, and its rollouts differ from those that were recorded before the "
                f"resume (in {', '.join(different)}): the environment, a reward or the sampler is not repeatable, so "
                "this run is not that of an uninterrupted one"
            )


def rollout_record(step: int, group: Group, rollout: Rollout, credit: RolloutCredit) -> dict[str, Any]:
    """One rollout as a line of the rollouts file, without observations; `group` is the start's index within the step.

    >>> {"step": 3, "group": 0, "prompt": "2+2=", "columns": {"answer": "4"}, "text": "4", "reward": 1.0,
    ...  "reward_parts": {"numeric": 1.0}, "score": 1.0, "end": "stop", "decisions": 2, "version": 2,
    ...  "advantage": 1.73, "baseline": 0.25}

    "decisions" counts the actions that the policy decided. "version" is that of the weights that sampled, which every
    update raises by 1. "advantage" is the mean over the decisions; null if the grading failed or the group was dropped.
    "baseline" is the mean reward of the graded rollouts of the group, null if they are fewer than two; with a critic it
    is the mean of its values over the decisions, null if the grading failed.

    Conversations have "messages", the chat after the prompt, and "turn_rewards", what the environment paid for each
    turn; "observation", the environment's first text, which follows the prompt, if there is one; and "failure", the
    reason, if the environment failed.

    Some keys are in some lines only. "kind": the kind of problem, if the task names kinds. "undecided": positions after
    the prompt, as [first, after the last] pairs, of actions that the policy did not decide, such as the tokens of a
    tool's output. "model_prompt": what a language model read before the completion, as "text" with special tokens and
    as "ids"; it is in the first rollout of a group, and in one that read another prompt than the rollout before it.
    "dropped": true in groups that were replaced by others, and not trained on. "tokens", with record.tokens: the fields
    of `covey.data.TokenTable`.
    """
    record = {
        "step": step,
        "group": group.start.index,
        **({"kind": group.start.kind} if group.start.kind else {}),
        **_attempt(group.start, rollout),
        "end": str(rollout.end),
        "decisions": rollout.decisions,
        **_undecided(rollout),
        "version": rollout.version,
        "advantage": credit.advantage,
        "baseline": credit.baseline,
    }
    record |= {"model_prompt": vars(credit.prompt)} if credit.prompt is not None else {}
    record |= {"dropped": True} if group.dropped else {}
    record |= {"tokens": vars(credit.tokens)} if credit.tokens is not None else {}
    return record | _steps(rollout)


def answer_record(step: int, max_new_tokens: int, start: Start, rollout: Rollout) -> dict[str, Any]:
    """A held-out answer as a line of its file; `problem` is the start's index among the held-out problems.

    >>> {"step": 20, "max_new_tokens": 64, "problem": 0, "prompt": "2+2=", "columns": {"answer": "4"}, "text": "5",
    ...  "reward": 0.0, "reward_parts": {"numeric": 0.0}, "score": 0.0, "tokens": 2, "truncated": False}

    "score" is the value that the evaluation averages, "reward" the weighted sum of "reward_parts"; null: not graded.
    "truncated" is true if the token limit ended the answer. "tokens" counts those that the model sampled; "undecided"
    is as in `rollout_record`.
    """
    return {
        "step": step,
        "max_new_tokens": max_new_tokens,
        "problem": start.index,
        **({"kind": start.kind} if start.kind else {}),
        **_attempt(start, rollout),
        "tokens": rollout.decisions,
        **_undecided(rollout),
        "truncated": rollout.end.is_limit,
    } | _steps(rollout)


def _attempt(start: Start, rollout: Rollout) -> dict[str, Any]:
    """The common fields of rollouts and held-out answers: the prompt with its columns, the completion, the rewards."""
    return {
        "prompt": start.prompt,
        "columns": dict(start.columns),
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "score": rollout.score,
        **({"extra": rollout.extras} if rollout.extras else {}),
        **({"observation": rollout.observation} if rollout.observation else {}),
        **({} if rollout.messages is None else {"messages": list(rollout.messages)}),
        **({} if rollout.turn_rewards is None else {"turn_rewards": list(rollout.turn_rewards)}),
        **({"failure": rollout.failure} if rollout.failure else {}),
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
    """The reasoning steps of a completion with their rewards; empty if it has none."""
    if rollout.step_texts is None or rollout.step_ends is None or rollout.step_rewards is None:
        return {}
    earned = [rollout.step_rewards[end] for end in rollout.step_ends]
    return {"steps": [list(step) for step in zip(rollout.step_texts, earned, strict=True)]}


def encode(value: Any, indent: int | None = None) -> bytes:
    """Standard JSON in UTF-8; NaN and infinity become null, a lone surrogate stays an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError):  # rare, and checking every value first takes twice as long
        text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Nested values in JSON's types; a value of any other type becomes its text."""
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
