"""Reads a run folder for display, also while a run writes it.

A file that is missing, damaged, or a link gives nothing instead of an error, and so does a key that an older run did
not write. `run_store` writes the same files.
"""

import bisect
import json
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from covey.config import ConfigError, RewardConfig
from covey.config.files import files_below, open_below, parse_json, parse_toml, read_below
from covey.config.model_sources import CONFIG_FILE
from covey.config.recipe import config_from_dict
from covey.tracking.run_folder import (
    HELD_OUT_FOLDER,
    ITERATIONS_FILE,
    METRICS_FILE,
    ORIGIN_FILE,
    RESUMED_BY,
    ROLLOUTS_FOLDER,
    STOPPED_FILE,
    SUMMARY_FILE,
)
from covey.tracking.run_store import parse_metrics
from covey.tracking.wording import SCORE, SCORE_KINDS, WORDINGS, ScoreKind

LONGEST_LINE = 64 << 20  # bytes; a longer one counts as damaged
LARGEST_DOCUMENT = 2 << 20  # bytes of a JSON or TOML file; real ones have a few kilobytes
STEP_FILE = re.compile(r"step_([0-9]{6,15})\.jsonl", re.ASCII)
LIMITS = ("length", "truncated")  # values of "end" of a rollout that a limit stopped, as in `EndReason.is_limit`
_GROUP = re.compile(rb'\{"step": ?[0-9]+, ?"group": ?([0-9]+)[,}]')  # how `run_store` begins a line


@dataclass
class Records:
    """The lines of a file of rollouts or held-out answers."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # of each line: its first byte and its length
    damaged: int = 0  # lines that could not be read


@dataclass(frozen=True)
class Group:
    """The rollouts of one start in one step. Numbers are over the graded rollouts."""

    number: int
    rollouts: list[dict[str, Any]]
    places: list[tuple[int, int]]

    @cached_property
    def rewards(self) -> list[float]:
        return [reward for line in self.rollouts if (reward := number(line.get("reward"))) is not None]

    @property
    def has_spread(self) -> bool:
        """True if the rewards differ."""
        return bool(self.rewards) and max(self.rewards) - min(self.rewards) > 1e-6 * max(map(abs, self.rewards))

    @property
    def has_signal(self) -> bool:
        """True if a rollout has an advantage: the rewards differ, or a critic predicted others."""
        return self.has_spread or any(number(line.get("advantage")) for line in self.rollouts)

    def model_prompt(self, index: int = 0) -> str:
        """The text that the model read before a rollout, with its special tokens; "" if it was not recorded."""
        read = (text(table(line.get("model_prompt")).get("text")) for line in reversed(self.rollouts[: index + 1]))
        return next(filter(None, read), "")

    @property
    def is_dropped(self) -> bool:
        """True if the group was not trained on because others were sampled to replace it."""
        return any(line.get("dropped") is True for line in self.rollouts)


class RunReader:
    """Reads the files of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def config(self) -> dict[str, Any] | None:
        """The tables of config.toml; None if it is missing or damaged."""
        try:
            return parse_toml(self._read(CONFIG_FILE), CONFIG_FILE)
        except (OSError, ConfigError):
            return None

    def origin(self) -> dict[str, Any]:
        """origin.json; {} if it is missing or damaged."""
        return self._document(ORIGIN_FILE) or {}

    def summary(self) -> dict[str, Any] | None:
        """summary.json, or stopped.json of a run that was stopped before its end; None before both."""
        return self._document(SUMMARY_FILE) or self._document(STOPPED_FILE)

    def iterations(self) -> list[dict[str, Any]]:
        """The lines of iterations.jsonl; [] if the run is not iterative."""
        return self._records(ITERATIONS_FILE).lines

    def rollout_steps(self) -> list[int]:
        """The steps with a file of rollouts, ascending."""
        return self._steps(ROLLOUTS_FOLDER)

    def held_out_steps(self) -> list[int]:
        """The steps with held-out answers, ascending; 0 is before training."""
        return self._steps(HELD_OUT_FOLDER)

    def groups(self, step: int, only: int | None = None) -> tuple[list[Group], int]:
        """The groups of a step, in the order of their numbers, and the count of damaged lines.

        Args:
            only: the number of the one group to read, which is quicker than reading all.

        Raises:
            OSError: if the step has no file of rollouts; `Refused` if it is a link, not a plain file, or too large.
        """
        records = self._lines(rollouts_file(step), only)
        found: dict[int, Group] = {}
        for line, place in zip(records.lines, records.places, strict=True):
            number = line.get("group")
            if type(number) is int and only in (None, number):
                group = found.setdefault(number, Group(number, [], []))
                group.rollouts.append(line)
                group.places.append(place)
            elif only is None:
                records.damaged += 1
        return [found[number] for number in sorted(found)], records.damaged

    def has_tokens(self, step: int) -> bool:
        """True if the rollouts of a step have tables of tokens."""
        with suppress(OSError), open_below(self.run_dir, *rollouts_file(step)) as file:
            return isinstance((parse_line(file.readline(LONGEST_LINE)) or {}).get("tokens"), dict)
        return False

    def held_out(self, step: int) -> Records:
        """The held-out answers of the weights after a step.

        Raises:
            OSError: as `groups`.
        """
        return self._lines((HELD_OUT_FOLDER, f"step_{step:06d}.jsonl"))

    def _read(self, name: str) -> bytes:
        return read_below(self.run_dir, name, most=LARGEST_DOCUMENT)

    def _document(self, name: str) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            document = parse_json(self._read(name), strict=False)
            return document if isinstance(document, dict) else None
        return None

    def _records(self, *parts: str) -> Records:
        try:
            return self._lines(parts)
        except OSError:
            return Records()

    def _lines(self, parts: tuple[str, ...], group: int | None = None) -> Records:
        """The lines of a JSONL file that are objects; a last line without its end is left out."""
        records, begin = Records(), 0
        content = read_below(self.run_dir, *parts)
        while (end := content.find(b"\n", begin)) >= 0:
            known = group is not None and _GROUP.match(content, begin, end)
            if not known or int(known[1]) == group:
                line = parse_line(content[begin:end])
                if line is None:
                    records.damaged += 1
                else:
                    records.lines.append(line)
                    records.places.append((begin, end - begin))
            begin = end + 1
        return records

    def _steps(self, folder: str) -> list[int]:
        try:
            files = files_below(self.run_dir, folder)
        except OSError:
            return []
        return sorted(int(match[1]) for name, _ in files if (match := STEP_FILE.fullmatch(name)))


def rollouts_file(step: int) -> tuple[str, str]:
    """The path of a step's file of rollouts below the run folder, in its parts."""
    return ROLLOUTS_FOLDER, f"step_{step:06d}.jsonl"


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object in a line of a JSONL file; None if it is damaged or has no number where the files have one."""
    if len(line) > LONGEST_LINE:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def number(value: Any) -> float | None:
    """The value as a finite number; None if it is none."""
    if type(value) not in (int, float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if abs(converted) < float("inf") else None


def text(value: Any) -> str:
    """The value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def table(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def is_truncated(line: dict[str, Any]) -> bool:
    """True if a token limit or a time limit ended the rollout."""
    return line.get("end") in LIMITS


def is_failed(line: dict[str, Any]) -> bool:
    """True if the rollout could not be graded."""
    return number(line.get("reward")) is None


def prompt_text(prompt: Any) -> str:
    """A prompt as one text; the messages of a chat one after another."""
    if isinstance(prompt, list):
        return "\n".join(text(table(message).get("content")) for message in prompt)
    return text(prompt) if prompt is None or isinstance(prompt, str) else str(prompt)


def ranges(steps: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as ranges, both ends included: [1, 2, 3, 7] as [[1, 3], [7, 7]]."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return found


def kind_of_run(config: Mapping[str, Any] | None, summary: Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """The domain and the score kind of a run, from its summary or, before it has one, from its config.

    The kind is None if the config does not say it, as for rewards that were given in Python.
    """
    summary = summary or {}
    told = text(summary.get("domain")), text(summary.get("score_kind"))
    if told in WORDINGS:
        return told
    if config is None:
        return None, None
    if "environment" in config:
        return "control", "return"
    if config.get("algorithm") in RESUMED_BY:  # a training on examples
        return "language", "loss"
    counted = _counted_reward(config)
    return "language", None if counted is None else "accuracy" if counted.is_binary else "score"


def scores_of_run(config: Mapping[str, Any] | None, summary: Mapping[str, Any] | None) -> ScoreKind:
    """The kind of a run's scores, "score" if unknown, within the limits of the reward that evaluations count."""
    kind = SCORE_KINDS.get(kind_of_run(config, summary)[1] or "", SCORE)
    counted = _counted_reward(config or {})
    return kind if counted is None else kind.within(counted.range)


def _counted_reward(config: Mapping[str, Any]) -> RewardConfig | None:
    """The reward that evaluations count; None if the config does not say it, as for rewards given in Python."""
    try:
        read: Any = config_from_dict(dict(config))
    except (ConfigError, TypeError, ValueError):
        return None
    return min(getattr(read, "rewards", ()), key=lambda reward: (not reward.score, reward.is_per_step), default=None)


LONGEST_ROW = 4 << 20  # bytes; a longer one counts as damaged
MOST_COLUMNS = 1000  # metrics of a run; later ones are left out
MOST_VALUES = 16 << 20  # steps times metrics; then every second step is dropped
LARGEST_FILE = 4 << 30  # bytes; a larger file has no steps
_CHUNK = 1 << 20
_TAIL = 64  # bytes before the place that was read last; if they change, the file is another one


class MetricTable:
    """The recorded steps of a run as columns, extended by `update` as the file grows.

    A last line without its end is left for the next update. Damaged lines are counted and skipped. If the file is
    replaced or shorter, or if its steps fall, as after a resume, the steps taken back are forgotten and `generation`
    grows.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.damaged = 0
        self._offset = 0  # of the first byte that was not read
        self._tail = b""
        self._file: tuple[int, int] | None = None  # device and inode
        self._skips = False  # the rest of an over-long line

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 before the first."""
        return self.steps[-1] if self.steps else 0

    def update(self) -> bool:
        """Read what was added to the file; returns True if the table changed. A missing file has no steps."""
        try:
            with open_below(self.run_dir, METRICS_FILE) as file:
                return self._read(file)
        except OSError:
            changed = bool(self.steps)
            if self._file is not None:
                self.generation += changed
                self._forget()
            return changed

    def _read(self, file: BinaryIO) -> bool:
        status, before = os.fstat(file.fileno()), (len(self.steps), self.generation)
        if self._file is not None and not self._continues(file, status):
            self.generation += 1
            self._forget()
        self._file = status.st_dev, status.st_ino
        file.seek(self._offset)
        for line in self._whole_lines(file, status.st_size if status.st_size <= LARGEST_FILE else 0):
            self._append(line)
        file.seek(max(0, self._offset - _TAIL))
        self._tail = file.read(min(_TAIL, self._offset))
        return (len(self.steps), self.generation) != before

    def _continues(self, file: BinaryIO, status: os.stat_result) -> bool:
        """True if the file is the one that was read before, possibly longer."""
        if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _whole_lines(self, file: BinaryIO, end: int) -> Iterator[bytes]:
        """The new lines before `end`, because a file could grow faster than it is read."""
        rest = b""
        while chunk := file.read(min(_CHUNK, max(0, end - file.tell()))):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                if self._skips:
                    self._skips = False
                else:
                    yield line
            if len(rest) > LONGEST_ROW:
                self._offset += len(rest)
                self.damaged += not self._skips
                self._skips, rest = True, b""

    def _append(self, line: bytes) -> None:
        record = parse_metrics(line)
        if record is None:
            self.damaged += 1
            return
        step = record.pop("step")
        record = {name: math.nan if value is None else value for name, value in record.items()}
        if step <= self.last_step:
            self._take_back(step)
        self.steps.append(step)
        count = len(self.steps)
        if list(record) == list(self.columns):  # as in most steps
            for column, value in zip(self.columns.values(), record.values(), strict=True):
                column.append(value)
        else:
            self._append_by_name(record)
        if count * len(self.columns) > MOST_VALUES:
            self._thin()

    def _append_by_name(self, record: Mapping[str, float]) -> None:
        new = [name for name in record if name not in self.columns]
        for name in new[: MOST_COLUMNS - len(self.columns)]:
            self.columns[name] = array("d", [math.nan]) * (len(self.steps) - 1)
        for name, column in self.columns.items():
            column.append(record.get(name, math.nan))

    def _take_back(self, step: int) -> None:
        self.generation += 1
        kept = bisect.bisect_left(self.steps, step)
        for column in (self.steps, *self.columns.values()):
            del column[kept:]  # type: ignore[attr-defined]

    def _thin(self) -> None:
        """Drop every second step, but not the last."""
        first = (len(self.steps) - 1) % 2
        self.steps = self.steps[first::2]
        self.columns = {name: column[first::2] for name, column in self.columns.items()}

    def rows(self) -> Sequence[Mapping[str, float | None]]:
        """The steps as mappings from "step" and the metrics to numbers, without those that a step does not have."""
        return _Rows(self)


class _Rows(Sequence[Mapping[str, "float | None"]]):
    """A view of a table: the mapping of a step is made when it is asked for."""

    def __init__(self, table: MetricTable) -> None:
        self._steps, self._columns = table.steps, table.columns
        self._count = len(self._steps)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._count))]
        if not -self._count <= place < self._count:
            raise IndexError(place)
        place %= self._count
        row: dict[str, float | None] = {"step": self._steps[place]}
        return row | {n: column[place] for n, column in self._columns.items() if not math.isnan(column[place])}


MODEL = "assistant"  # the role of the model
ENVIRONMENT = "environment"  # role of the first observation, which the model reads at the end of its prompt
SHOWN_AT_FIRST = 40  # turns, where not all of them are asked for


class Call(TypedDict):
    """A call of a tool: name and text of each argument. A value that is not text is JSON."""

    name: str
    arguments: list[tuple[str, str]]


class Turn(TypedDict):
    """A message of a conversation."""

    role: str
    name: str  # of the tool that replies
    text: str
    calls: list[Call]
    unread: list[str]  # texts of calls that could not be read
    reward: float | None  # of a turn of the model; None if no turn of the conversation was paid


def conversation_turns(record: Mapping[str, Any]) -> list[Turn]:
    """The turns of a rollout or a held-out answer, the first observation before them; [] if it is not a conversation.

    The reward of a turn is the weighted sum of its rewards if the record has `steps`, else what the environment paid.
    """
    messages = record.get("messages")
    if not isinstance(messages, list):
        return []
    rewards = iter(_rewards(record))
    found = []
    if observation := text(record.get("observation")):
        found.append(Turn(role=ENVIRONMENT, name="", text=observation, calls=[], unread=[], reward=None))
    for message in map(table, messages):
        role = text(message.get("role")) or "message"
        calls, unread = message.get("tool_calls"), message.get("unread_calls")
        found.append(
            Turn(
                role=role,
                name=text(message.get("name")),
                text=_shown(message.get("content")),
                calls=list(map(_call, calls)) if isinstance(calls, list) else [],
                unread=list(map(_shown, unread)) if isinstance(unread, list) else [],
                reward=next(rewards, None) if role == MODEL else None,
            )
        )
    return found


def searched_text(record: Mapping[str, Any]) -> str:
    """The text in which a rollout or an answer is searched: its completion, which has all turns and replies.

    A first observation follows, calls that could not be read, and arguments, which the completion shows with escapes
    as Python does.
    """
    completion, others = text(record.get("text")), list[str]()
    for turn in conversation_turns(record):
        others += [turn["text"]] if turn["role"] == ENVIRONMENT else []
        others += turn["unread"]
        others += [value for call in turn["calls"] for _, value in call["arguments"]]
    return "\n".join([completion, *(other for other in others if other not in completion)])


def _shown(value: Any) -> str:
    """A text as it is, nothing as an empty text, any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _call(value: Any) -> Call:
    function = table(table(value).get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        given = [(name, _shown(argument)) for name, argument in arguments.items()]
    else:
        given = [("", _shown(arguments))] if arguments else []
    return Call(name=_shown(function.get("name")), arguments=given)


def _rewards(record: Mapping[str, Any]) -> list[float | None]:
    """The reward of each turn of the model; [] if none was paid."""
    steps, paid = record.get("steps"), record.get("turn_rewards")
    given = [step[-1] for step in steps if isinstance(step, list) and step] if isinstance(steps, list) else paid
    rewards = [number(reward) for reward in given] if isinstance(given, list) else []
    return rewards if any(rewards) else []
