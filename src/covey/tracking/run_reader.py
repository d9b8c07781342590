"""Reads a run folder for display, also while a run writes it.

A file that is missing, damaged, or a link gives nothing instead of an error, and so does a key that an older run did
not write. `run_store` writes the same files; `metric_table` reads `metrics.jsonl`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from covey.config import ConfigError, ControlConfig
from covey.config.files import files_below, open_below, parse_json, parse_toml, read_below
from covey.config.model_sources import CONFIG_FILE
from covey.config.recipe import config_from_dict
from covey.tracking.run_folder import HELD_OUT_FOLDER, ORIGIN_FILE, ROLLOUTS_FOLDER
from covey.tracking.run_store import ITERATIONS_FILE, STOPPED_FILE, SUMMARY_FILE
from covey.tracking.wording import WORDINGS

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
    def has_signal(self) -> bool:
        """True if the rewards differ, so that the group has a gradient."""
        return bool(self.rewards) and max(self.rewards) - min(self.rewards) > 1e-6 * max(map(abs, self.rewards))

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
    try:
        read = config_from_dict(dict(config))
    except (ConfigError, TypeError, ValueError):
        return "language", None
    if isinstance(read, ControlConfig):
        return "control", "return"
    if not read.rewards:
        return "language", None
    counted = min(read.rewards, key=lambda reward: (not reward.score, reward.is_per_step))
    return "language", "accuracy" if counted.is_binary else "score"
