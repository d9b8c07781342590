"""Tasks of conversations with an environment: its seeds, rows of a data file, games, and texts to search."""

import json
import random
from typing import Any

from covey.config import (
    ConfigError,
    DatasetConfig,
    EnvironmentTaskConfig,
    GuessNumberConfig,
    LookupConfig,
    MazeConfig,
    RewardConfig,
)
from covey.data import Start
from covey.llm.conversation.environments import guess_number, maze
from covey.llm.data.rows import ONE_PROMPT, Row, divide, row_of, stable_hash
from covey.llm.tasks.dataset import PromptDataset
from covey.llm.tasks.generated import GIVE_UP_AFTER, GeneratedTask, Problem, checked

TRAINING_SEEDS = 2**30  # seeds from here on are held out
Prompts = dict[str, list[dict[str, Any]]]  # "training" and "held_out" rows


class EnvironmentSeeds:
    """Seeds for an environment that makes a problem from each; implements `covey.data.Task`.

    The column is `seed`, from 0 to 2^30 - 1 in training; the held-out seeds are the numbers from 2^30 on. The prompt is
    the instruction, which the first observation of the environment follows.

    >>> EnvironmentSeeds(instruction="Find a way out of the maze.")
    """

    name = "environment"
    config_type = EnvironmentTaskConfig
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


class _RowByColumns(Row):
    """A row that differs from others by its columns, because the prompts are equal."""

    @property
    def content(self) -> str:
        return super().content + json.dumps(self.columns, sort_keys=True)


class EnvironmentRows(PromptDataset):
    """The prompts that an environment brings; implements `covey.data.Task`.

    Without held-out prompts of its own, `held_out_fraction` of the prompts is held out, as in `PromptDataset`. A
    training row whose prompt is held out is dropped. If all have one prompt, as in a game with a hidden word, rows with
    different columns count as different prompts.
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
            raise ConfigError(f"task.instruction is set, but {source} brings prompts of its own: remove it")
        training, held_out = (
            [row_of(f"{source}, {name} row {number}", row) for number, row in enumerate(prompts[side])]
            for side, name in (("training", "training"), ("held_out", "held-out"))
        )
        if len({row.content for row in [*training, *held_out]}) == 1:
            training, held_out = (
                list[Row](_RowByColumns(**vars(row)) for row in rows) for rows in (training, held_out)
            )
        own = f"{source}, held-out rows" if held_out else ""
        self.config = DatasetConfig(source, held_out_path=own, held_out_fraction=config.held_out_fraction)
        one_prompt, fraction = ONE_PROMPT.format(path=source), config.held_out_fraction
        self._take(divide(training, held_out, fraction, paths=(source, own), drop=True, one_prompt=one_prompt))


class GuessNumberTask(GeneratedTask[GuessNumberConfig]):
    """Numbers to guess, for the environment `guess_number`, which pays the reward.

    The columns are those of the environment: `secret`, `highest`, `guesses`.

    >>> GuessNumberTask(highest=20, guesses=5)
    """

    name = "guess_number"
    config_type = GuessNumberConfig

    def problem(self, rng: random.Random) -> Problem:
        highest, guesses = self.config.highest, self.config.guesses
        secret = rng.randint(1, highest)
        return Problem(
            key=f"guess_number {secret} of {highest}",
            question=guess_number.question(highest, guesses),
            columns={"secret": secret, "highest": highest, "guesses": guesses},
            hidden=str(secret),
        )


class MazeTask(GeneratedTask[MazeConfig]):
    """Random mazes with a way to the exit, for the environment `maze`, which pays the reward.

    A maze has `size` x `size` places; about a quarter of them are walls. The shortest way from the start to the exit
    has at least `size` steps, and at most as many as the moves that are allowed. The columns are those of the
    environment: `maze`, `moves`.

    >>> MazeTask(size=5, moves=15)
    """

    name = "maze"
    config_type = MazeConfig

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of MazeConfig."""
        super().__init__(**fields)
        if self.config.moves < self.config.size:
            raise ConfigError(
                f"task.moves is {self.config.moves}, but the way to the exit has at least {self.config.size} steps "
                "(task.size): set task.moves to twice the size or more"
            )

    def problem(self, rng: random.Random) -> Problem:
        size, moves = self.config.size, self.config.moves
        for _ in range(GIVE_UP_AFTER):
            places = [(row, column) for row in range(size) for column in range(size)]
            start, goal = rng.sample(places, 2)
            marks = {place: maze.WALL for place in places if rng.random() < 0.25} | {start: maze.START, goal: maze.EXIT}
            lines = ["".join(marks.get((row, column), " ") for column in range(size)) for row in range(size)]
            if size <= maze.distances(lines, goal).get(start, 0) <= moves:
                return Problem(
                    key=f"maze {lines}",
                    question=maze.question(lines, moves),
                    columns={"maze": lines, "moves": moves},
                    hidden=str(lines),
                )
        raise ConfigError("task maze: no maze can be made; allow more moves")


_BEGINNINGS = ("Bel", "Dor", "Fal", "Gar", "Hol", "Kar", "Lin", "Mor", "Nor", "Pel", "Ran", "Sel", "Tor", "Val", "Wen")
_MIDDLES = ("a", "e", "i", "o", "am", "en", "ir", "or")
_ENDS = ("bury", "dale", "ford", "gate", "ham", "mere", "stead", "ton", "wick", "worth")
_RIVERS = ("Alder", "Brock", "Colm", "Drave", "Esk", "Fenn", "Gower", "Ister")
_GOODS = ("wool", "glass", "salt", "copper", "timber", "cheese", "paper", "rope")
_QUESTIONS = {
    "founded": "In which year was the town {town} founded?",
    "people": "How many people live in the town {town}?",
    "bridges": "How many bridges has the town {town}?",
}


class Lookup(GeneratedTask[LookupConfig]):
    """Questions about towns that do not exist, so that a model must search their descriptions.

    The columns are `documents`, the name of each town -> its description, and `answer`, a number.

    >>> Lookup(documents=20)
    """

    name = "lookup"
    config_type = LookupConfig
    default_rewards = (RewardConfig(name="numeric"),)

    def problem(self, rng: random.Random) -> Problem:
        towns: dict[str, dict[str, int]] = {}
        documents: dict[str, str] = {}
        while len(towns) < self.config.documents:
            town = rng.choice(_BEGINNINGS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)
            facts = {
                "founded": rng.randint(1050, 1890),
                "people": rng.randint(300, 90_000),
                "bridges": rng.randint(2, 40),
            }
            towns[town] = facts
            documents[town] = (
                f"{town} is a town on the river {rng.choice(_RIVERS)}. It was founded in {facts['founded']}. "
                f"Its market is known for {rng.choice(_GOODS)}. It has {facts['bridges']} bridges, and "
                f"{facts['people']} people live there."
            )
        town, fact = rng.choice(list(towns)), rng.choice(list(_QUESTIONS))
        question = f"{_QUESTIONS[fact].format(town=town)} {self.config.instruction}".strip()
        answer = str(towns[town][fact])
        return Problem(
            key=f"lookup {town} {fact}",
            question=question,
            columns={"answer": answer, "documents": documents},
            hidden=answer,
        )
