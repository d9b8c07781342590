"""Prompts from a user's data set, checked line by line at the start of a run."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from covey.config import ConfigError, DatasetConfig, RewardConfig
from covey.config.fields import plural
from covey.data import Start
from covey.llm.data.arrow import rows_as_written
from covey.llm.data.images import ImagePrompt
from covey.llm.data.rows import ONE_PROMPT, Row, Split, hold_out, prompt_hash, read_data, row_of, stable_hash
from covey.llm.tasks.generated import checked
from covey.llm.tasks.prompt_limit import PromptLimit


class PromptDataset:
    """The rows of a JSONL or Parquet file or of a saved data set, as prompts with columns; implements `Task`.

    Other columns are passed to the rewards under their own names. Rows in the format of verl
    (`reward_model.ground_truth` becomes the column `answer`) and of reasoning-gym (`question` becomes a user message)
    are accepted too.

    The lines of `held_out_path` are held out; without one, `held_out_fraction` of the different prompts of `path`,
    chosen by a hash of the prompt, at least one. Training draws without replacement: each pass over the file has its
    own order, a function of (seed, pass), so a resumed run needs no state.

    >>> PromptDataset(path="problems.jsonl", held_out_fraction=0.2)

    Raises:
        ConfigError: naming file and line, if a line is unusable; if the file is missing or empty.
    """

    name = "dataset"
    config_type: type = DatasetConfig
    default_rewards: tuple[RewardConfig, ...] = (RewardConfig(name="numeric"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of DatasetConfig."""
        self.config = config = checked(DatasetConfig, fields)
        config.check()
        self._take(read_data(config))

    def _take(self, data: Split[Row]) -> None:
        self._training, self._held_out, self._overlap = data.training, data.held_out, data.overlap
        self._too_long = 0
        if any(isinstance(row.prompt, ImagePrompt) for row in self.rows):
            self._training, self._held_out = (
                [_beside_images(row) for row in part] for part in (self._training, self._held_out)
            )

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """The next `count` rows after the `before` rows drawn so far; steps count from 1."""
        size = len(self._training)
        begin = (step - 1) * count + first if before is None else before
        return [
            _start(first + place, self._training[order_of_pass(seed, position // size, size)[position % size]])
            for place, position in enumerate(range(begin, begin + count))
        ]

    def held_out(self, count: int) -> list[Start]:
        """The first `count` different held-out prompts in the order of a hash, or all if there are fewer."""
        different = {row.content: row for row in reversed(self._held_out)}
        rows = [different[content] for content in sorted(different, key=prompt_hash)]
        return [_start(index, row) for index, row in enumerate(rows[:count])]

    @property
    def rows(self) -> Sequence[Row]:
        """All rows, those for training first."""
        return [*self._training, *self._held_out]

    def describe(self) -> str:
        """Number of training and of held-out prompts, and their source."""
        config = self.config
        training, held_out = (len({row.content for row in rows}) for rows in (self._training, self._held_out))
        lines = f" (on {len(self._training):,} lines)" if training < len(self._training) else ""
        where = config.sources[1] or f"task.held_out_fraction = {config.held_out_fraction:g}"
        dropped = f"; {plural(self._overlap, 'line')} dropped that {where} holds too" if self._overlap else ""
        prompts = plural(training, "different prompt")
        long = f"; {plural(self._too_long, 'line')} dropped as too long for the model" if self._too_long else ""
        return f"{config.path}: {prompts}{lines} to train on, {held_out:,} held out ({where}){dropped}{long}"

    def keep_fitting(self, limit: PromptLimit | None, held_out_limit: PromptLimit) -> None:
        """Drop the lines whose prompts are too long for a model, or refuse the first, according to the limits.

        Args:
            limit: for training prompts; None: they are not checked.
            held_out_limit: for held-out prompts, whose answers may be longer.

        Raises:
            ConfigError: for a refused prompt, with file and line; if no line is left.
        """
        path = self.config.path
        if limit is not None:
            self._training = self._fitting(self._training, path, limit)
        self._held_out = self._fitting(self._held_out, self.config.sources[1] or path, held_out_limit)

    def _fitting(self, rows: list[Row], path: str, limit: PromptLimit) -> list[Row]:
        kept: list[Row] = []
        for row in rows:
            try:
                fault = limit.fault(row.prompt)
            except ConfigError as error:
                raise ConfigError(f"{row.place}: {error}") from None
            if fault and not limit.drop:
                raise ConfigError(
                    f'{row.place}: {fault}; or set sampling.long_prompts = "drop" to leave such lines out'
                )
            if not fault:
                kept.append(row)
        if not kept:
            raise ConfigError(f"every prompt of {path} is too long; {rows[0].place}: {limit.fault(rows[0].prompt)}")
        self._too_long += len(rows) - len(kept)
        return kept


class Rows(PromptDataset):
    """Prompts from Python instead of a file: dicts, or a data set of the package `datasets`; implements `Task`.

    >>> run(RunConfig(), task=[{"prompt": "What is 2 + 2?", "answer": "4"}, ...], rewards=[mine])

    Args:
        rows: each with a `prompt` (string or chat messages) and any other columns.
        held_out_fraction: fraction of the different prompts that is held out from training, at least one.

    Raises:
        ConfigError: for the first unusable row; if there is only one prompt.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], held_out_fraction: float = 0.1):
        self.config = checked(DatasetConfig, {"path": "task", "held_out_fraction": held_out_fraction})
        taken = []
        for number, record in enumerate(rows_as_written(rows)):
            place = f"task[{number}]"
            if not isinstance(record, Mapping):
                kind = type(record).__name__
                raise ConfigError(f"{place} is of type {kind}: give dicts, {{'prompt': ..., 'answer': ...}}")
            taken.append(row_of(place, record))
        if not taken:
            raise ConfigError("task is empty: give at least two prompts")
        self._take(hold_out(taken, self.config.held_out_fraction, one_prompt=ONE_PROMPT.format(path=self.config.path)))


@lru_cache(maxsize=4)
def order_of_pass(seed: int, epoch: int, size: int) -> Sequence[int]:
    """The order of pass `epoch` over `size` rows."""
    order = list(range(size))
    random.Random(stable_hash("order", seed, epoch)).shuffle(order)
    return order


def _beside_images(row: Row) -> Row:
    """A row of a data set with images. Raises ConfigError if its prompt is a plain string."""
    if isinstance(row.prompt, str):
        raise ConfigError(f"{row.place}: 'prompt' is a plain string, and other rows have images: give chat messages")
    return row if isinstance(row.prompt, ImagePrompt) else replace(row, prompt=ImagePrompt(row.prompt))


def _start(index: int, row: Row) -> Start:
    return Start(index=index, prompt=row.prompt, columns=dict(row.columns), place=row.place)
