"""Prompts from a JSONL file of the user's own, checked line by line before anything else starts."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from covey.config import ConfigError, JsonlConfig, RewardConfig
from covey.config.checks import check_task
from covey.data import Start
from covey.llm.tasks.generated import checked, stable_hash

RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")


@dataclass(frozen=True)
class Row:
    """One line of the file, checked."""

    line: int
    prompt: Any  # a string or chat messages
    columns: dict[str, Any]

    @property
    def content(self) -> str:
        """What makes two prompts the same."""
        return json.dumps(self.prompt, sort_keys=True)


class Jsonl:
    """A JSONL file with a `prompt` column (string or chat messages) and any other columns; implements `Task`.

    Other columns reach the rewards under their own names. Rows in the format of verl (`reward_model.ground_truth`
    becomes the column `answer`) and of reasoning-gym (`question` becomes a user message) are taken too.

    Held out are the lines of `held_out_path`, or else `held_out_share` of the different prompts of `path`, chosen by
    a hash of the prompt, at least one. Training draws without replacement: each pass over the file has its own
    order, a function of (seed, pass), so a resumed run needs no state.

    >>> Jsonl(path="problems.jsonl", held_out_share=0.2)

    Raises:
        ConfigError: naming file and line, if a line is unusable; if the file is missing or empty.
    """

    name = "jsonl"
    default_rewards = (RewardConfig(name="numeric"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of JsonlConfig."""
        self.config = config = checked(JsonlConfig, fields)
        check_task(config)
        rows = read_rows(config.path)
        if config.held_out_path:
            self._training, self._held_out = rows, read_rows(config.held_out_path)
            self._refuse_overlap()
        else:
            self._training, self._held_out = _split(rows, config)

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """The `count` rows of a step that follow on those drawn `before`; steps count from 1."""
        size = len(self._training)
        begin = (step - 1) * count + first if before is None else before
        return [
            _start(first + place, self._training[order_of_pass(seed, position // size, size)[position % size]])
            for place, position in enumerate(range(begin, begin + count))
        ]

    def held_out(self, count: int) -> list[Start]:
        """The first `count` different held-out prompts, in an order chosen by hash.

        Raises:
            ConfigError: if there are fewer.
        """
        different = {row.content: row for row in reversed(self._held_out)}
        rows = [different[content] for content in sorted(different, key=_prompt_hash)]
        if len(rows) < count:
            raise ConfigError(
                f"{self.config.held_out_path or self.config.path} has {len(rows)} different held-out prompts, {count} "
                f"are asked for: evaluate fewer, or give more with held_out_path or held_out_share"
            )
        return [_start(index, row) for index, row in enumerate(rows[:count])]

    def _refuse_overlap(self) -> None:
        held_out = {row.content: row.line for row in self._held_out}
        for row in self._training:
            if row.content in held_out:
                raise ConfigError(
                    f"{self.config.path} line {row.line}: this prompt is also in {self.config.held_out_path} line "
                    f"{held_out[row.content]}, so training would see a held-out prompt; remove one of them"
                )


def read_rows(path: str) -> list[Row]:
    """All rows of a JSONL file; blank lines are skipped.

    Raises:
        ConfigError: "data.jsonl line 7: ..." for the first line that is unusable.
    """
    try:
        lines = Path(path).expanduser().read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(number, line))
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}") from None
    if not rows:
        raise ConfigError(f"{path} is empty: it needs one JSON object with a 'prompt' on each line")
    return rows


def _row(number: int, line: bytes) -> Row:
    """Raises ValueError with what is wrong with the line."""
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except UnicodeDecodeError:
        raise ValueError("not valid UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, this is {_kind(record)}")
    return row_of(number, record)


def row_of(number: int, record: Mapping[str, Any]) -> Row:
    """A row of a data set, checked. Raises ValueError with what is wrong with it."""
    columns = dict(record)
    if "prompt" in columns:
        prompt = columns.pop("prompt")
    elif isinstance(columns.get("question"), str):  # reasoning-gym, GSM8K
        prompt = [{"role": "user", "content": columns.pop("question")}]
    else:
        raise ValueError("there is no 'prompt'")
    _check_prompt(prompt)
    verl = columns.get("reward_model")
    if "answer" not in columns and isinstance(verl, dict) and "ground_truth" in verl:
        columns["answer"] = verl["ground_truth"]
    for name in RESERVED:
        if name in columns:
            raise ValueError(f"the column name {name!r} is reserved; rename the column")
    return Row(number, prompt, columns)


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"'prompt' must be a string or a list of chat messages, this is {_kind(prompt)}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError("'prompt' is empty")
    if isinstance(prompt, list):
        for position, message in enumerate(prompt, start=1):
            for key in ("role", "content"):
                if not isinstance(message, dict) or not isinstance(message.get(key), str):
                    raise ValueError(f"message {position} of 'prompt' needs a {key!r} that is a string")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _split(rows: list[Row], config: JsonlConfig) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows; rows with the same prompt stay together."""
    contents = sorted({row.content for row in rows}, key=_prompt_hash)
    if len(contents) < 2:
        raise ConfigError(f"{config.path} has only one prompt: none is left for evaluation; set held_out_path")
    count = min(max(1, round(config.held_out_share * len(contents))), len(contents) - 1)
    held_out = set(contents[:count])
    return [row for row in rows if row.content not in held_out], [row for row in rows if row.content in held_out]


def _prompt_hash(content: str) -> int:
    return stable_hash("prompt", content)


@lru_cache(maxsize=4)
def order_of_pass(seed: int, epoch: int, size: int) -> Sequence[int]:
    """The order of pass `epoch` over `size` rows."""
    order = list(range(size))
    random.Random(stable_hash("order", seed, epoch)).shuffle(order)
    return order


def _start(index: int, row: Row) -> Start:
    return Start(index=index, prompt=row.prompt, columns=dict(row.columns))
