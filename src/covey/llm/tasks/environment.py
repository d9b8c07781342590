"""The task `environment`: prompts for environments that make their own problems, or bring their own prompts."""

from __future__ import annotations

from typing import Any

from covey.config import ConfigError, DatasetConfig, EnvironmentTaskConfig, RewardConfig
from covey.data import Start
from covey.llm.data.rows import Data, Row, row_of, split, stable_hash
from covey.llm.tasks.dataset import PromptDataset
from covey.llm.tasks.generated import checked

TRAINING_SEEDS = 2**30  # seeds from here on are held out
Prompts = dict[str, list[dict[str, Any]]]  # "training" and "held_out" rows


class EnvironmentSeeds:
    """Seeds for an environment that makes a problem from each; implements `covey.data.Task`.

    The column is `seed`, from 0 to 2^30 - 1 in training; the held-out seeds are the numbers from 2^30 on. The prompt is
    the instruction, which the first observation of the environment follows.

    >>> EnvironmentSeeds(instruction="Find a way out of the maze.")
    """

    name = "environment"
    default_rewards: tuple[RewardConfig, ...] = ()

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of EnvironmentTaskConfig."""
        self.config = checked(EnvironmentTaskConfig, fields)

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """`count` training starts; each is a function of (seed, step, its index) alone; `before` is ignored."""
        return [
            self._start(index, stable_hash("environment", seed, step, index) % TRAINING_SEEDS)
            for index in range(first, first + count)
        ]

    def held_out(self, count: int) -> list[Start]:
        """The first `count` held-out seeds."""
        return [self._start(index, TRAINING_SEEDS + index) for index in range(count)]

    def _start(self, index: int, seed: int) -> Start:
        prompt = [{"role": "user", "content": self.config.instruction}]
        return Start(index=index, prompt=prompt, columns={"seed": seed})


class EnvironmentRows(PromptDataset):
    """The prompts that an environment brings; implements `covey.data.Task`.

    Without held-out prompts of its own, `held_out_fraction` of the prompts is held out, as in `PromptDataset`. A
    training row whose prompt is held out is dropped.
    """

    name = "environment"
    default_rewards: tuple[RewardConfig, ...] = ()

    def __init__(self, prompts: Prompts, config: EnvironmentTaskConfig, source: str) -> None:
        """
        Args:
            prompts: rows with a `prompt` and columns, for training and held out; the latter may be none.
            source: of the prompts, for messages.

        Raises:
            ConfigError: for the first row that is unusable; if there are too few.
        """
        if config.instruction:
            raise ConfigError(f"task.instruction is set, but {source} brings prompts of its own: take it out")
        training, held_out = (
            [row_of(f"{source}, {name} row {number}", row) for number, row in enumerate(prompts[side])]
            for side, name in (("training", "training"), ("held_out", "held-out"))
        )
        own = f"{source}, held-out rows" if held_out else ""
        self.config = DatasetConfig(source, held_out_path=own, held_out_fraction=config.held_out_fraction)
        self._take(_without(training, held_out) if held_out else split(training, self.config))
        if not self._training:
            raise ConfigError(f"{source} has no prompt for training that is not held out")


def _without(training: list[Row], held_out: list[Row]) -> Data:
    known = {row.content for row in held_out}
    kept = [row for row in training if row.content not in known]
    return Data(kept, held_out, overlap=len(training) - len(kept))
